"""Prompts in order, without what is to be predicted, and which samples are answered together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.datasets.recall import RecallRecords, RecallTask
from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.datasets.scene_files import write_scenes
from subtoken_train.evaluation.runner.cell import plan_batches, recall_prompts, record_prompts
from subtoken_train.evaluation.tasks.task import Sample
from subtoken_train.types import Region
from tests.support.text_families import text_family


def test_records_in_order_up_to_the_limit(tiny_family, tmp_path):
    write_scenes(tmp_path / "scenes", train=2, dev=9, test=2)
    records = InstructionRecords(tmp_path / "scenes" / "dev.json")
    batches = list(record_prompts(tiny_family, records, limit=7, batch_size=3))
    assert [len(batch.record_ids) for batch in batches] == [3, 3, 1]
    assert [name for batch in batches for name in batch.record_ids] == [records[i].id for i in range(7)]
    for batch in batches:
        assert not (batch.regions_BN == Region.ANSWER).any()
        assert (batch.regions_BN[:, -1] == Region.QUERY).all()  # padded on the left
    assert sum(len(batch.record_ids) for batch in record_prompts(tiny_family, records, limit=99)) == 9


def test_recall_questions_without_answers():
    family = text_family("llama")
    batches = list(recall_prompts(family, limit=5, batch_size=2, context_length=2048))
    assert [len(batch.record_ids) for batch in batches] == [2, 2, 1]
    records = RecallRecords(RecallTask(family.tokenizer, 2048), "dev", 5)
    for number, batch in enumerate(batches):
        assert not (batch.regions_BN == Region.ANSWER).any()
        assert (batch.regions_BN == Region.CONTEXT).sum(-1).tolist() == [2048] * len(batch.record_ids)
        first = records[2 * number].text
        length = first.prompt_length
        assert batch.input_ids_BN[0, :length].tolist() == list(first.input_ids[:length])
        assert (batch.regions_BN[0, length:] == Region.PADDING).all()


samples = st.lists(
    st.builds(
        Sample,
        id=st.uuids().map(str),
        prompt=st.text(min_size=1, max_size=30),
        reference=st.just({}),
        choices=st.sampled_from([(), (" A", " B")]),
        max_new_tokens=st.sampled_from([8, 32]),
        stop=st.sampled_from([(), ("\n",)]),
    ),
    max_size=40,
)


@pytest.mark.slow
@given(samples, st.integers(1, 9))
def test_every_sample_is_in_one_batch_of_its_kind(asked, size):
    plan = plan_batches(asked, size)
    assert sorted(place for batch in plan for place in batch) == list(range(len(asked)))
    for batch in plan:
        assert 1 <= len(batch) <= size
        kinds = {(bool(s.choices), s.choices == () and s.max_new_tokens, s.stop) for s in (asked[i] for i in batch)}
        assert len(kinds) == 1
    assert plan == plan_batches(asked, size)


def test_long_prompts_come_first_and_together():
    asked = [Sample(str(n), "x" * n, {}) for n in (3, 9, 1, 8, 2, 7)]
    assert [[len(asked[i].prompt) for i in batch] for batch in plan_batches(asked, 2)] == [[9, 8], [7, 3], [2, 1]]
