"""Bytes of each sample, and entries that are read back."""

import pytest
import torch

from subtoken_train.cache.by_sample import sample_shares
from subtoken_train.cache.entries import read_keys, read_values
from subtoken_train.cache.packed_layer import PackedLayer
from tests.support.packing import FORMAT_OF, SETS, Dense, dense

VECTOR = {0: 8 * 4, 8: 8 + 2, 4: 4 + 2}  # bytes of 8 channels


def counted(state: Dense, sample: int) -> tuple[int, int, int]:
    """(whole slices, partly stored slices, channels of the latter) of a sample, entry by entry."""
    heads = state.key.shape[1]
    keep_hN = state.keep[sample].expand(heads, -1)
    whole_N = torch.ones(keep_hN.shape[1], dtype=torch.bool)
    if state.groups is not None:
        whole_N = state.groups[sample].all(-1)
    routed_hN = keep_hN & ~whole_N
    channels = int(state.channels[sample][routed_hN].sum())
    return int((keep_hN & whole_N).sum()), int(routed_hN.sum()), channels


@pytest.mark.parametrize("bits", [0, 8, 4])
@pytest.mark.parametrize("layout", ["contiguous", "per_head"])
@pytest.mark.parametrize("num_groups", [None, 2, 4])
@pytest.mark.parametrize("sets", SETS)
def test_shares_add_up_and_are_the_samples_own(sets, num_groups, layout, bits):
    state = dense(seed=3, batch=4, num_groups=num_groups, sets=sets, layout=layout, bits=bits)
    layer: PackedLayer = state.layer()
    whole_slice = 2 * FORMAT_OF[bits].bytes_of(1, 8, torch.float32, "values")
    shares = sample_shares(layer.blocks, layer.keys)
    assert sum(share.total_bytes for share in shares) == layer.payload_bytes + layer.index_bytes
    assert whole_slice == 2 * VECTOR[bits]
    for sample, share in enumerate(shares):
        whole, routed, channels = counted(state, sample)
        assert share.routed_channels == channels
        assert (share.routed_bytes > 0) == (routed > 0)
        assert share.total_bytes - share.routed_bytes - whole * whole_slice in (0, 8, 16)  # row numbers
        if bits == 0:
            assert share.index_bytes == share.routed_bytes - routed * VECTOR[0] - 4 * channels
            assert 0 <= share.index_bytes <= 4 * channels + 200
        else:  # keys, a scale for the pieces of each slice, and the pieces
            assert share.index_bytes == share.routed_bytes - routed * (VECTOR[bits] + 2) - channels * bits // 8


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
