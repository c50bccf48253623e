"""Packing keeps what the plan keeps, in as few bytes as promised."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.cache.pack import Packing, pack_layer
from subtoken_train.cache.packed_layer import PackedLayer
from subtoken_train.engine.prompt_pass import layer_plan
from subtoken_train.kernels.storage import RoutedValues, dense_values
from subtoken_train.ledger.kv_budget import KVShape
from subtoken_train.ledger.measure import measured_ledger
from subtoken_train.types import Plan, Region
from tests.support.packing import FORMAT_OF, SETS, dense

LAYOUTS = ("contiguous", "per_head")


@given(
    seed=st.integers(0, 999),
    sets=st.sampled_from(SETS),
    layout=st.sampled_from(LAYOUTS),
    shape=st.sampled_from([(1, 8, 4), (2, 8, 4), (4, 8, 2), (3, 16, 2), (6, 8, 4)]),
    share=st.sampled_from([0.0, 0.4, 1.0]),
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


@given(seed=st.integers(0, 999), sets=st.sampled_from(SETS), layout=st.sampled_from(LAYOUTS))
def test_the_ledger_of_the_plan_says_the_same_bytes(seed, sets, layout):
    state = dense(seed, 3, 4, 21, 8, 8, 0.4, sets, layout)
    layer, shape = state.layer(), KVShape(1, 4, 8, 4)
    plan = Plan([layer_plan(state.keep, state.groups)], layout)
    ledger = measured_ledger(plan, torch.full((3, 21), Region.VISUAL), shape)
    assert layer.payload_bytes == ledger.bytes_of(with_index=False)


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
    seed=st.integers(0, 999),
    sets=st.sampled_from(SETS),
    layout=st.sampled_from(LAYOUTS),
    shape=st.sampled_from([(1, 8, 4), (2, 8, 4), (4, 8, 2), (2, 8, 2), (6, 8, 4)]),
    share=st.sampled_from([0.0, 0.4, 1.0]),
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
