"""What the panels read of a micro-batch: entries of the compressed region before and after the reducer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from subtoken_train.engine.prompt_pass import Rows
from subtoken_train.training.module import StepRecord

WHOLE = ((1, 2, 2, 2, 4), (1, 2, 4, 0, 0))
CUT = ((1, 2, 4), (1, 2, 4))
BARE = ((1, 4), (1, 4))


def rows(codes) -> Rows:
    regions = torch.tensor(codes)
    return Rows.whole(regions, regions)


def record(*spans, codes=WHOLE, kept: dict[int, Tensor] | None = None) -> StepRecord:
    """Two samples with 3 and 1 visual tokens; each span is (first layer, last layer + 1, its rows)."""
    found = [(start, stop, rows(of_span)) for start, stop, of_span in spans]
    return StepRecord(torch.tensor(codes), found[-1][2], found, None, kept or {})


@pytest.mark.parametrize(
    ("spans", "before", "after"),
    [
        ([(0, 2, WHOLE)], 8, 8),
        ([(0, 2, CUT)], 8, 4),
        ([(0, 1, WHOLE), (1, 4, CUT)], 16, 4 + 3 * 2),
        ([(0, 2, BARE)], 8, 0),
    ],
    ids=["everything", "before layer 0", "between layers", "nothing left"],
)
def test_entries_are_summed_over_layers(spans, before, after):
    assert tuple(map(int, record(*spans).compressed())) == (before, after)


def test_a_contexts_entries_are_those_that_later_rows_see():
    codes = ((3, 3, 3, 3, 4),)
    kept = {layer: torch.tensor([[layer == 0, False, True, False, False]]) for layer in range(2)}
    found = record((0, 2, codes), codes=codes, kept=kept)
    region = int(record((0, 2, codes), codes=codes).compressed()[0])
    assert tuple(map(int, found.compressed())) == (region, 3)
    assert region == 8
