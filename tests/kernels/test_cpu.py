"""Attention on packed storage is attention over dense keys and values under the same mask."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subtoken_train.kernels import formats, native
from subtoken_train.kernels.cpu import packed_attention
from subtoken_train.kernels.reference import reference_attention
from subtoken_train.kernels.storage import CacheWindow, Tail
from tests.support.packing import DRAWN, SETS, dense, masked_attention, states

SHAPES = [
    (1, 1, 8, 4),
    (2, 1, 8, 4),  # a group is half a head
    (2, 3, 8, 1),  # one group of all heads
    (4, 1, 8, 2),  # a group is two heads
    (3, 2, 16, 2),  # a group is one and a half heads
    (2, 8, 8, 8),  # many query rows a head
]
"""(key-value heads, query heads of each, width, S)."""


def compare(state, query_heads: int, tail: int, new: int, seed: int, bound: float) -> None:
    kv_heads, width, dtype = state.key.shape[1], state.key.shape[-1], state.key.dtype
    layer = state.layer()
    tail_key, tail_value = (states(seed + i, len(state.key), kv_heads, tail, width, dtype) for i in (1, 2))
    query = states(seed + 3, len(state.key), kv_heads * query_heads, new, width, dtype)
    layer.update(tail_key, tail_value)
    expected = masked_attention(state, query, tail_key, tail_value)
    for path, in_c in (("cpu", True), ("cpu", False), ("reference", False)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SUBTOKEN_KERNEL", path)
            if not in_c:
                patch.setattr(native, "library", lambda: None)
            got = layer.attend(query, width**-0.5)
        assert got.dtype == dtype
        assert (got.float() - expected).abs().max() < bound


@settings(max_examples=120, deadline=None)
@given(
    **DRAWN,
    shape=st.sampled_from(SHAPES),
    routed=st.booleans(),
    new=st.sampled_from([1, 1, 3]),
    earlier=st.sampled_from([0, 5]),
    fill=st.sampled_from(["none", "mean", "learned"]),
)
def test_packed_attention_is_masked_dense_attention(seed, sets, layout, shape, share, routed, new, earlier, fill):
    kv_heads, query_heads, width, num_groups = shape
    groups = num_groups if routed else None
    state = dense(seed, 3, kv_heads, 21, width, groups, share, sets, layout, fill=fill)
    compare(state, query_heads, earlier + new, new, seed, 1e-5)


@pytest.mark.parametrize(
    ("sets", "query_heads", "fill"), zip(SETS, [2, 8, 2], ["none", "mean", "learned"], strict=True)
)
def test_bf16(sets, query_heads, fill):
    compare(dense(3, sets=sets, dtype=torch.bfloat16, fill=fill), query_heads, 4, 2, 3, 0.05)


@given(
    **DRAWN,
    shape=st.sampled_from([(1, 1, 8, 4), (2, 1, 8, 4), (2, 3, 8, 1), (4, 2, 8, 2), (2, 8, 8, 4)]),
    bits=st.sampled_from([0, 8, 4]),
    chunk=st.sampled_from([formats.CHUNK, 200, 1]),
    new=st.sampled_from([1, 1, 3]),
    padded=st.booleans(),
    room=st.sampled_from([0, 4]),
    window=st.sampled_from([None, 9]),
)
def test_padded_tails_rooms_and_rounded_pieces(
    seed, sets, layout, shape, share, bits, chunk, new, padded, room, window
):
    """The two paths agree where the dense comparison does not reach; what lies behind the tail's end is not read."""
    kv_heads, query_heads, width, num_groups = shape
    state = dense(seed, 3, kv_heads, 21, width, num_groups, share, sets, layout, bits)
    blocks, reach = state.layer().blocks, None
    length, generator = 5 + new, torch.Generator().manual_seed(seed)
    keys, values = (states(seed + i, 3, kv_heads, length + room, width) for i in (1, 2))
    query = states(seed + 3, 3, kv_heads * query_heads, new, width)
    start = torch.randint(0, 6, (3,), generator=generator) if padded else None
    if window is not None:
        for part in (part for block in blocks for part in block.parts):
            part.position_RM = torch.randint(0, 21, part.keys.data.shape[::2][:2], generator=generator).int()
        reach = CacheWindow(window, torch.full((3,), 21))
    written = torch.tensor([length]) if room else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "CHUNK", chunk)
        tail = Tail(keys, values, length, start, written)
        got = packed_attention(query, blocks, tail, width**-0.5, reach)
    tail = Tail(keys[:, :, :length], values[:, :, :length], length, start)
    assert (got - reference_attention(query, blocks, tail, width**-0.5, reach)).abs().max() < 1e-5
