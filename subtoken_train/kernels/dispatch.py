"""Attention on packed storage by the path that fits: the one door that the cache knows.

Legend: B batch, H query heads, q new tokens, d head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from subtoken_train.kernels.choice import choose_kernel
from subtoken_train.kernels.cpu import packed_attention
from subtoken_train.kernels.reach import Reach
from subtoken_train.kernels.reference import reference_attention
from subtoken_train.kernels.storage import Block
from subtoken_train.kernels.tail import Tail


def attend(query_BHqd: Tensor, blocks: Sequence[Block], tail: Tail, scale: float, reach: Reach | None = None) -> Tensor:
    """Attention of the last q tokens over packed entries and the tail, [B, H, q, d].

    Args:
        query_BHqd: rotated queries of the new tokens.
        blocks: the prompt's entries; every row of the batch is in exactly one block. All are seen by every new token.
        tail: everything since the prompt, the new tokens last.
        scale: factor of the scores.
        reach: a window, in which every new token sees entries and tail; None: all of them.

    Everything is computed in the queries' dtype; under autocast in autocast's, and so is the result, as in torch's own
    attention. Which path runs, ``choose_kernel`` says.

    Raises:
        ValueError: see ``choose_kernel``.
    """
    device = query_BHqd.device.type
    if torch.is_autocast_enabled(device):
        lower = query_BHqd.to(torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            return attend(lower, blocks, tail, scale, reach)
    if choose_kernel(device).path == "reference":
        return reference_attention(query_BHqd, blocks, tail, scale, reach)
    return packed_attention(query_BHqd, blocks, tail, scale, reach)
