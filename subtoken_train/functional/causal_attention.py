"""Causal attention of rows that stand at the end of what they see, without a mask of all rows against all columns.

Legend: B batch, H query heads, h key-value heads (H a multiple of h), q rows, K columns, d head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from subtoken_train.functional.window import SlidingWindow


def causal_attention(
    query_BHqd: Tensor,
    key_BhKd: Tensor,
    value_BhKd: Tensor,
    seen_BK: Tensor,
    scale: float,
    block: int,
    dropout: float = 0.0,
    window: SlidingWindow | None = None,
) -> Tensor:
    """Attention of the last q of K places, [B, H, q, d].

    Args:
        query_BHqd: rotated queries of at least one place.
        key_BhKd: rotated keys; query head i reads key head i // (H / h).
        value_BhKd: values.
        seen_BK: places that are seen by what stands after them, bool; every place sees itself (padding would see
            nothing and turn NaN).
        scale: factor of the scores.
        block: rows at a time.
        dropout: of the probabilities.
        window: of all K places; None: every place sees all before it.
    """
    rows, columns = query_BHqd.shape[2], key_BhKd.shape[2]
    places_K = torch.arange(columns, device=query_BHqd.device)
    parts = []
    for start in range(0, rows, block):
        stop = min(start + block, rows)
        first, end = columns - rows + start, columns - rows + stop
        rows_q1, columns_K = places_K[first:end, None], places_K[:end]
        mask_BqK = (rows_q1 >= columns_K) & seen_BK[:, None, :end]
        if window is not None:
            mask_BqK = mask_BqK & window.of_rows(first, end).to(mask_BqK.device)
        mask_BqK = mask_BqK | (rows_q1 == columns_K)
        parts.append(
            F.scaled_dot_product_attention(
                query_BHqd[:, :, start:stop],
                key_BhKd[:, :, :end],
                value_BhKd[:, :, :end],
                mask_BqK[:, None],
                dropout_p=dropout,
                scale=scale,
                enable_gqa=query_BHqd.shape[1] != key_BhKd.shape[1],
            )
        )
    return torch.cat(parts, 2) if len(parts) > 1 else parts[0]
