"""Causal attention of rows that stand at the end of what they see, without a mask of all rows against all columns.

Where all that stands before a row is seen there is no mask at all; else one of a block of rows. On a CPU rows that
stand after others have one too: no kernel there knows where they stand.

Legend: B batch, H query heads, h key-value heads (H a multiple of h), q rows, K columns, d head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from subtoken_train.functional.fused_attention import fused_attention, shared_heads
from subtoken_train.functional.window import SlidingWindow


@dataclass(frozen=True)
class Seen:
    """What rows see of the places up to their own.

    Attributes:
        places_BK: places that are seen by what stands after them, bool; every place sees itself (padding would see
            nothing and turn NaN). None: all of them. Whoever knows that says so: to look would make a device wait.
        window: of all K places; None: every place sees all before it.
    """

    places_BK: Tensor | None = None
    window: SlidingWindow | None = None

    def until(self, end: int) -> Seen:
        """The same of the first places."""
        return Seen(None if self.places_BK is None else self.places_BK[:, :end], self.window)

    def first_column(self, row: int) -> int:
        """The first place that a row, or one after it, may see.

        Positions rise by one or more from row to row, but not over padding, which the places may hold.
        """
        return 0 if self.window is None or self.places_BK is not None else max(0, row + 1 - self.window.size)

    def of_rows(self, first: int, end: int, device: torch.device) -> Tensor:
        """What rows ``first`` to ``end`` see of the places from ``first_column`` to ``end``, bool [B or 1, q, K']."""
        left = self.first_column(first)
        rows_q1 = torch.arange(first, end, device=device)[:, None]
        columns_K = torch.arange(left, end, device=device)
        seen_BqK = (rows_q1 >= columns_K)[None]
        if self.places_BK is not None:
            seen_BqK = seen_BqK & self.places_BK[:, None, left:end].to(device)
        if self.window is not None:
            seen_BqK = seen_BqK & self.window.of_rows(first, end, left).to(device)
        return seen_BqK | (rows_q1 == columns_K)


def causal_attention(
    query_BHqd: Tensor,
    key_BhKd: Tensor,
    value_BhKd: Tensor,
    seen: Seen,
    scale: float,
    block: int,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of the last q of K places, [B, H, q, d].

    Args:
        query_BHqd: rotated queries of at least one place.
        key_BhKd: rotated keys; query head i reads key head i // (H / h).
        value_BhKd: values.
        seen: of the K places.
        scale: factor of the scores.
        block: rows that have a mask at a time.
        dropout: of the probabilities.
    """
    rows, columns = query_BHqd.shape[2], key_BhKd.shape[2]
    if seen.places_BK is None and seen.window is None and (rows == columns or query_BHqd.is_cuda):
        return fused_attention(query_BHqd, key_BhKd, value_BhKd, scale, dropout=dropout)
    key, value = shared_heads(query_BHqd, key_BhKd, value_BhKd, masked=True)
    parts = []
    for start in range(0, rows, block):
        stop = min(start + block, rows)
        first, end = columns - rows + start, columns - rows + stop
        part = slice(seen.first_column(first), end)
        mask_B1qK = seen.of_rows(first, end, query_BHqd.device)[:, None]
        query = query_BHqd[:, :, start:stop]
        parts.append(fused_attention(query, key[:, :, part], value[:, :, part], scale, mask_B1qK, dropout))
    return torch.cat(parts, 2) if len(parts) > 1 else parts[0]
