"""Attention on packed storage by the path that fits: the only entry point for the cache.

Legend: B batch, H query heads, q new tokens, d head width.
"""

import warnings
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from subtoken_train.errors import SubTokenWarning
from subtoken_train.kernels.choice import VARIABLE, choose_kernel
from subtoken_train.kernels.cpu import packed_attention
from subtoken_train.kernels.native import native_attention, serves
from subtoken_train.kernels.reference import reference_attention
from subtoken_train.kernels.row_table import FusedState, unserved
from subtoken_train.kernels.storage import Block, CacheWindow, Fill, Tail


def attend(
    query_BHqd: Tensor,
    blocks: Sequence[Block],
    tail: Tail,
    scale: float,
    reach: CacheWindow | None = None,
    state: FusedState | None = None,
    fill: Fill | None = None,
) -> Tensor:
    """Attend from the last q tokens to entries and tail, [B, H, q, d], in the queries' dtype (or autocast's).

    Every row of the batch is in exactly one block. ``reach``: a window over entries and tail; ``fill``: what pieces
    that are not stored read as. What the fused kernels do not serve goes the CPU's way, with one warning.
    """
    device = query_BHqd.device.type
    if torch.is_autocast_enabled(device):
        lower = query_BHqd.to(torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            return attend(lower, blocks, tail, scale, reach, state, fill)
    if (choice := choose_kernel(device)).path == "reference":
        return reference_attention(query_BHqd, blocks, tail, scale, reach, fill)
    if choice.path == "triton":
        if (reason := unserved(blocks, query_BHqd)) is None:
            from subtoken_train.kernels.triton_attention import fused_decoding

            batch, kv_heads, _, width = tail.room_keys_BhTd.shape
            state = state or FusedState()
            table = state.table_of(blocks, batch, kv_heads, width, fill)
            return fused_decoding(query_BHqd, table, tail, scale, reach, state.workspace)
        if choice.forced:
            raise ValueError(f"{VARIABLE}=triton: the fused kernels do not serve {reason}; unset {VARIABLE}")
        _say(reason)
    if reach is None and fill is None and serves(query_BHqd, blocks, tail):
        return native_attention(query_BHqd, {0: (blocks, tail)}, scale)
    return packed_attention(query_BHqd, blocks, tail, scale, reach, fill)


@lru_cache
def _say(reason: str) -> None:
    words = f"decoding runs without the fused kernels, which do not serve {reason}; it is slower"
    warnings.warn(words, SubTokenWarning, stacklevel=3)
