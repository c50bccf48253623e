"""Quest's page scores and the one-shot choice of whole pages (Tang et al., 2024), as pure tensor functions.

Legend: B batch, N positions, H query heads, h key-value heads, Q query rows, d head width, P pages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subtoken_train.functional.gather import keep_best


def page_index(context_BN: Tensor, page_size: int) -> Tensor:
    """Page of every context token, [B, N] int64: ``page_size`` consecutive context tokens each; -1 elsewhere."""
    ordinal_BN = context_BN.long().cumsum(-1) - 1
    return torch.where(context_BN, ordinal_BN // page_size, -1)


def page_bounds(key_BhNd: Tensor, page_BN: Tensor, num_pages: int) -> tuple[Tensor, Tensor]:
    """Channel-wise minimum and maximum of the (rotated) keys of each page, [B, h, P, d] in fp32.

    Pages that a sample does not have get +inf and -inf.
    """
    batch, heads, _, width = key_BhNd.shape
    slot = page_BN.masked_fill(page_BN < 0, num_pages)[:, None, :, None].expand_as(key_BhNd)
    empty = key_BhNd.new_full((batch, heads, num_pages + 1, width), torch.inf, dtype=torch.float32)
    low = empty.scatter_reduce(2, slot, key_BhNd.float(), "amin")
    high = (-empty).scatter_reduce(2, slot, key_BhNd.float(), "amax")
    return low[:, :, :num_pages], high[:, :, :num_pages]


def page_scores(query_BHQd: Tensor, asks_BQ: Tensor, low_BhPd: Tensor, high_BhPd: Tensor) -> Tensor:
    """Mean over query rows and heads of Quest's upper bound sum_d max(q_d * low_d, q_d * high_d), [B, P] in fp32.

    The bound is linear in the positive and the negative part of q, so rows and the query heads of a group are averaged
    before they meet a page. Unscaled, as released. Pages that a sample does not have score NaN or infinity; the choice
    masks them.

    Args:
        query_BHQd: rotated queries; several query heads share a key-value head (GQA).
        asks_BQ: rows that count, bool; a sample without any scores 0 for every page.
        low_BhPd: from ``page_bounds``.
        high_BhPd: from ``page_bounds``.
    """
    kv_heads = low_BhPd.shape[1]
    weight_BQ = asks_BQ.float() / asks_BQ.sum(-1, keepdim=True).clamp(min=1)
    query = query_BHQd.float().reshape(len(query_BHQd), kv_heads, -1, *query_BHQd.shape[2:])
    with torch.autocast(query.device.type, enabled=False):  # training must choose the pages that inference chooses
        positive_Bhd = torch.einsum("bhgqd,bq->bhd", query.clamp(min=0), weight_BQ) / query.shape[2]
        negative_Bhd = torch.einsum("bhgqd,bq->bhd", query.clamp(max=0), weight_BQ) / query.shape[2]
        bound_BhP = torch.einsum("bhd,bhpd->bhp", positive_Bhd, high_BhPd)
        bound_BhP = bound_BhP + torch.einsum("bhd,bhpd->bhp", negative_Bhd, low_BhPd)
    return bound_BhP.mean(1)


def keep_pages(scores_BP: Tensor, page_BN: Tensor, count_B: Tensor, protected_B: Tensor) -> Tensor:
    """Context tokens of the kept pages, bool [B, N].

    Args:
        scores_BP: page scores.
        page_BN: from ``page_index``.
        count_B: pages to keep of each sample, the protected ones among them.
        protected_B: last pages of each sample that always stay; at most ``count_B``.
    """
    pages_B1 = page_BN.amax(-1, keepdim=True) + 1
    number_P = torch.arange(scores_BP.shape[1], device=scores_BP.device)
    exists_BP = number_P < pages_B1
    recent_BP = exists_BP & (number_P >= pages_B1 - protected_B[:, None])
    chosen_BP = recent_BP | keep_best(scores_BP, exists_BP & ~recent_BP, count_B - protected_B)
    return (page_BN >= 0) & chosen_BP.gather(1, page_BN.clamp(min=0))
