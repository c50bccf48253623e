"""Prompts in the order of their records or drawn ones, without answers."""

from subtoken_train.calibrating.base import recall_prompts, record_prompts
from subtoken_train.datasets.recall import RecallRecords, RecallTask
from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.datasets.scenes import write_scenes
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
