"""Packing keeps what the plan keeps, in as few bytes as promised, and reads the device once; bytes of each sample."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.cache.by_sample import sample_shares
from subtoken_train.cache.entries import read_keys, read_values
from subtoken_train.cache.pack import Packing, pack_layer, read_counts
from subtoken_train.cache.packed_layer import PackedLayer
from subtoken_train.engine.prompt_pass import layer_plan
from subtoken_train.kernels.storage import RoutedValues, dense_values
from subtoken_train.types import CutKeys
from tests.support.packing import DRAWN, FORMAT_OF, SETS, Dense, dense, numbers
from tests.support.sampling import sampled
from tests.support.shards import host_reads

LAYOUTS = ("contiguous", "per_head")
VECTOR = {0: 8 * 4, 8: 8 + 2, 4: 4 + 2}  # bytes of 8 channels


@given(
    **DRAWN,
    shape=st.sampled_from([(1, 8, 4), (2, 8, 4), (4, 8, 2), (3, 16, 2), (6, 8, 4)]),
    routed=st.booleans(),
)
def test_bytes_are_those_of_the_kept_channels(seed, sets, layout, shape, share, routed):
    """Keys of kept entries, existing channels of their values, a bit per group or piece: nothing else."""
    kv_heads, width, num_groups = shape
    state = dense(seed, 3, kv_heads, 21, width, num_groups if routed else None, share, sets, layout)
    layer = state.layer()
    keep = state.keep.expand(-1, kv_heads, -1)
    assert layer.payload_bytes == 4 * int(keep.sum() * width + (state.channels & keep[..., None]).sum())
    for block in layer.blocks:
        for part in block.parts:
            if isinstance(part.values, RoutedValues):
                index = part.values.index
                if index is None:
                    assert set(torch.tensor(part.values.bounds).diff().tolist()) <= {0, part.entries}
                else:
                    assert index.shape[-1] == -(-part.values.entries // 8)
                assert part.values.entries == part.entries


@pytest.mark.parametrize(("kv_heads", "name"), [(2, "Qwen2.5-VL-3B"), (32, "LLaVA-7B")])
@pytest.mark.parametrize("entries", [256, 1024])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_index_is_at_most_half_a_percent(kv_heads, name, entries, layout):
    key = torch.zeros(1, kv_heads, entries, 128, dtype=torch.bfloat16)
    groups = torch.rand(1, entries, 16, generator=torch.Generator().manual_seed(0)).argsort(-1) < 4
    keep = torch.ones(1, 1, entries, dtype=torch.bool)
    layer = PackedLayer()
    layer.store_prompt(pack_layer(key, key, layer_plan(keep, groups), Packing(layout)), entries, key)
    assert layer.payload_bytes == entries * kv_heads * 128 * 2 * 5 // 4
    assert layer.index_bytes <= 0.005 * layer.payload_bytes, name


@given(
    **DRAWN,
    shape=st.sampled_from([(1, 8, 4), (2, 8, 4), (4, 8, 2), (2, 8, 2), (6, 8, 4)]),
    bits=st.sampled_from([8, 4]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    fill=st.sampled_from(["none", "mean"]),
    ties=st.booleans(),
)
def test_rounded_pieces_of_an_entry_share_a_scale(seed, sets, layout, shape, share, bits, dtype, fill, ties):
    """What is read is each head's value without its dropped groups, rounded as one vector; a token may keep none."""
    kv_heads, width, num_groups = shape
    state = dense(seed, 3, kv_heads, 21, width, num_groups, share, sets, layout, bits, dtype, fill)
    if ties:
        state.value.copy_(state.value.sign())
    form, value = FORMAT_OF[bits], state.read
    if state.fill is not None:  # what is stored goes without it
        value = value - state.fill.vectors_Bhd[:, :, None]
    expected, partial_BhN = form.store(value * state.channels), state.keep & ~state.groups.all(-1)[:, None]
    took = slices = channels = 0
    for block in state.layer().blocks:
        rows = range(block.num_rows) if block.rows is None else block.rows.tolist()
        for part in (part for part in block.parts if isinstance(part.values, RoutedValues)):
            for place, row in enumerate(rows):
                for of_row in range(block.heads):
                    sample, head = divmod(row * block.heads + of_row, kv_heads)
                    own = partial_BhN.expand(-1, kv_heads, -1)[sample, head]
                    assert torch.equal(part.values.pieces.scale[place, of_row], expected.scale[sample, head, own])
                    assert torch.equal(dense_values(part)[place, of_row], form.read(expected)[sample, head, own])
                    slices, channels = slices + int(own.sum()), channels + int(state.channels[sample, head, own].sum())
            took += part.payloads[1].nbytes
    assert took == channels * bits // 8 + 2 * slices


def counted(state: Dense, sample: int) -> tuple[int, int, int]:
    """(whole slices, partly stored slices, channels of the latter) of a sample, entry by entry."""
    keep_hN = state.keep[sample].expand(state.key.shape[1], -1)
    whole_N = torch.ones(keep_hN.shape[1], dtype=torch.bool)
    if state.groups is not None:
        whole_N = state.groups[sample].all(-1)
    routed_hN = keep_hN & ~whole_N
    return int((keep_hN & whole_N).sum()), int(routed_hN.sum()), int(state.channels[sample][routed_hN].sum())


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
        wanted = state.read[sample, head, keep][state.key[sample, head, keep, 0].argsort()]
        assert (stored[keys[place][: len(stored), 0].argsort()] - wanted).abs().max() < 1e-6
        assert not values[place][len(stored) :].any() or fill != "none"


def planned(sets, groups, layout, cut, seed=0):
    state = dense(seed, 3, 2, 21, 8, groups, 0.4, sets, layout)
    plan = layer_plan(state.keep, state.groups)
    if cut:
        channels = torch.arange(8).expand(3, 2, 8) % 2 == seed % 2
        plan.cut_keys = CutKeys((plan.entries_BN % 3 == 0) & (plan.entries_BN >= 0), 4, channels)
    return state, plan


@pytest.mark.parametrize("cut", [False, True])
@sampled("layout", LAYOUTS, every=3)
@pytest.mark.parametrize("groups", [None, 4])
@pytest.mark.parametrize("sets", SETS)
def test_counts_of_many_layers_are_read_once(sets, groups, layout, cut):
    layers = [planned(sets, groups, layout, cut, seed) for seed in range(3)]
    with host_reads() as found:
        counts = read_counts([plan for _, plan in layers], 2, 8, layout, [FORMAT_OF[8]] * 3)
    assert len(found) == 1
    for (state, plan), own in zip(layers, counts, strict=True):
        value = state.value * state.channels
        with host_reads() as found:
            blocks = pack_layer(state.key, value, plan, Packing(layout, FORMAT_OF[8]), None, own)
        assert not found
        with host_reads() as found:
            alone = pack_layer(state.key, value, plan, Packing(layout, FORMAT_OF[8]))
        assert len(found) == 1
        for one, other in zip(numbers(blocks).values(), numbers(alone).values(), strict=True):
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        for block in blocks:
            assert block.numbers == (None if block.rows is None else block.rows.tolist())
            for values in (part.values for part in block.parts):
                if isinstance(values, RoutedValues):
                    assert values.bounds == [*values.offsets.tolist(), len(values.pieces.data)]


@pytest.mark.parametrize("sets", SETS)
def test_counts_are_those_of_a_plain_loop(sets):
    _, plan = planned(sets, 4, "contiguous", True)
    (counts,) = read_counts([plan], 2, 8, "contiguous", [FORMAT_OF[0]])
    heads = [(sample, head) for sample in range(3) for head in range(2 if sets == "own" else 1)]
    for row, (sample, head) in enumerate(heads):
        expected, bits = [0] * 4, [[0] * (2 if sets == "own" else 4) for _ in range(2)]
        for place, entry in enumerate(plan.entries_BN[sample].tolist()):
            if entry < 0 or (sets == "own" and not plan.heads_BNh[sample, place, head]):
                continue
            groups = plan.group_mask_BNS[sample, place].tolist()
            cut = int(plan.cut_keys.entries_BN[sample, place])
            expected[2 * all(groups) + (1 - cut)] += 1
            if not all(groups):  # groups are half heads: of two heads the first has groups 0 and 1
                own = groups if sets != "own" else groups[2 * head : 2 * head + 2]
                bits[1 - cut] = [have + is_set for have, is_set in zip(bits[1 - cut], own, strict=True)]
        assert counts.kinds[row] == tuple(expected)
        assert [kind[row] for kind in counts.bits] == bits
