"""Which samples are answered together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.evaluation.runner.cell import plan_batches
from subtoken_train.evaluation.tasks.task import Sample

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
