"""Statistics of attention probabilities without the N x N matrix: rows are computed a block at a time, in fp32.

Rows are causal by place in the sequence, and never see keys that ``keys_BN`` leaves out.

Legend: B batch, H query heads, h key-value heads (H a multiple of h), N positions, W chosen rows, d head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Literal

import torch
from torch import Tensor

from subtoken_train.functional.causal_attention import SlidingWindow

BLOCK = 128  # rows of the attention matrix that exist at a time


def attention_rows(
    query_BHNd: Tensor,
    key_BhNd: Tensor,
    index_BW: Tensor,
    keys_BN: Tensor,
    scale: float,
    offset: int = 0,
    window: SlidingWindow | None = None,
) -> Tensor:
    """Attention probabilities of chosen rows, [B, H, W, N] in fp32; 0 everywhere in a row that may see no key.

    ``index_BW``: int64, -1 is none; ``keys_BN``: keys that may be seen, bool; ``offset``: place of the first query
    among the keys.
    """
    batch, heads, _, width = query_BHNd.shape
    length = key_BhNd.shape[2]
    rows_BW = index_BW.clamp(min=0)
    chosen = query_BHNd.gather(2, rows_BW[:, None, :, None].expand(-1, heads, -1, width)).float()
    grouped = (chosen * scale).view(batch, key_BhNd.shape[1], -1, width)  # the query heads of a key head, row after row
    logits = (grouped @ key_BhNd.float().transpose(-1, -2)).view(batch, heads, -1, length)
    places_N = torch.arange(length, device=query_BHNd.device)
    seen_BWN = (places_N <= rows_BW[..., None] + offset) & keys_BN[:, None] & (index_BW >= 0)[..., None]
    if window is not None:
        seen_BWN = seen_BWN & window.of_index(rows_BW + offset)
    probabilities = logits.masked_fill_(~seen_BWN[:, None], -torch.inf).softmax(-1)
    blind_BW = ~seen_BWN.any(-1)
    if blind_BW.is_cuda or bool(blind_BW.any()):  # seldom needed; a device would wait longer to hear so
        probabilities = probabilities.masked_fill(blind_BW[:, None, :, None], 0.0)
    return probabilities


def attention_blocks(
    query_BHNd: Tensor,
    key_BhNd: Tensor,
    rows_BN: Tensor,
    keys_BN: Tensor,
    scale: float,
    block: int = BLOCK,
    offset: int = 0,
    window: SlidingWindow | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Walk over the marked rows: yields (index_BW, probabilities [B, H, W, N]) with at most ``block`` rows each.

    ``rows_BN``: the rows that are wanted, bool; a sample with fewer of them pads ``index_BW`` with -1.
    """
    count_B = rows_BN.sum(-1)
    order_BN = rows_BN.int().sort(dim=-1, descending=True, stable=True).indices
    most = int(count_B.max())
    for start in range(0, most, block):
        index_BW = order_BN[:, start : min(start + block, most)]
        places_W = torch.arange(start, start + index_BW.shape[1], device=index_BW.device)
        index_BW = index_BW.masked_fill(places_W >= count_B[:, None], -1)
        yield index_BW, attention_rows(query_BHNd, key_BhNd, index_BW, keys_BN, scale, offset, window)


def attention_paid(blocks: Iterator[tuple[Tensor, Tensor]], over_heads: Literal["mean", "max"] = "mean") -> Tensor:
    """Attention that all rows of some blocks pay to each position, [B, N] in fp32; a sample without rows gets zeros."""

    def summed(index_BW: Tensor, attention_BHWN: Tensor) -> Tensor:
        rows_BWN = attention_BHWN.mean(1) if over_heads == "mean" else attention_BHWN.amax(1)
        return (rows_BWN * (index_BW >= 0)[..., None]).sum(1)

    return reduce(torch.add, (summed(*block) for block in blocks))
