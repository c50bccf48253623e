"""What is read back of a packed layer is what was packed, entry by entry, with the fill where a group is not stored."""

from __future__ import annotations

import pytest
import torch

from subtoken_train.cache.entries import read_keys, read_values
from tests.support.packing import SETS, dense


def by_first(vectors_Md):
    return vectors_Md[vectors_Md[:, 0].argsort()]


@pytest.mark.parametrize("fill", ["none", "mean", "learned"])
@pytest.mark.parametrize("sets", SETS)
def test_entries_are_read_back(sets, fill):
    state = dense(5, sets=sets, fill=fill)
    layer, heads = state.layer(), state.key.shape[1]
    rows = len(state.key) * (heads if sets == "own" else 1)
    keys, values = read_keys(layer.blocks, rows), read_values(layer.blocks, rows, state.fill)
    for sample, head in torch.cartesian_prod(torch.arange(len(state.key)), torch.arange(heads)).tolist():
        place = (sample * heads + head, 0) if sets == "own" else (sample, head)
        keep = state.keep[sample, head if sets == "own" else 0]
        stored = values[place][: int(keep.sum())]
        assert torch.equal(by_first(keys[place][: len(stored)]), by_first(state.key[sample, head, keep]))
        by_key = keys[place][: len(stored), 0].argsort()
        wanted = state.read[sample, head, keep][state.key[sample, head, keep, 0].argsort()]
        assert (stored[by_key] - wanted).abs().max() < 1e-6
        assert not values[place][len(stored) :].any() or fill != "none"
