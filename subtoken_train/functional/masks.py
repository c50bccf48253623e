"""Group masks with exact budgets, and the gradient that passes through them (paper, sections 3.3, 3.4 and 3.6).

Legend: B batch, N positions, S groups. Ranking is done in fp32; ties go to the lower index (group within a token;
token, then group, across a sample).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def top_indices(scores: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` largest scores along the last axis, best first; ties go to the lower index."""
    return scores.float().sort(dim=-1, descending=True, stable=True).indices[..., :count]


def fixed_mask(scores_BNS: Tensor, kept_groups: int) -> Tensor:
    """Fixed budget (paper, section 3.3): bool [B, N, S] with exactly ``kept_groups`` True per token."""
    mask_BNS = torch.zeros_like(scores_BNS, dtype=torch.bool)
    return mask_BNS.scatter_(-1, top_indices(scores_BNS, kept_groups), True)


def counted_mask(scores_BNS: Tensor, count_BN: Tensor) -> Tensor:
    """A budget per token: bool [B, N, S] with exactly ``count_BN`` (int64, 0 to S) True in each token."""
    order_BNS = top_indices(scores_BNS, scores_BNS.shape[-1])
    within_BNS = torch.arange(scores_BNS.shape[-1], device=scores_BNS.device) < count_BN[..., None]
    return torch.zeros_like(scores_BNS, dtype=torch.bool).scatter_(-1, order_BNS, within_BNS)


def ranked_counts(rank_BN: Tensor, routed_BN: Tensor, kept_groups: int, num_groups: int) -> Tensor:
    """Ranked budget (ours): groups of each routed token by its rank, int64 [B, N], n * K in each sample exactly.

    Rank j of n should get ``high + (low - high) * (j + 0.5) / n``, with ``high = min(S, 2K)`` and ``low = 2K - high``.
    These are rounded down, and what is missing from n * K goes to the best-ranked, one group each. ``rank_BN`` is
    ignored where nothing is routed.
    """
    high = min(num_groups, 2 * kept_groups)
    low = 2 * kept_groups - high
    n_B1 = routed_BN.sum(-1, keepdim=True)
    # 2n times the ideal count, so that it is whole
    scaled_BN = 2 * n_B1 * high + (low - high) * (2 * rank_BN + 1)
    floor_BN = torch.where(routed_BN, scaled_BN // (2 * n_B1).clamp(min=1), 0)
    missing_B1 = n_B1 * kept_groups - floor_BN.sum(-1, keepdim=True)
    return floor_BN + (routed_BN & (rank_BN < missing_B1))


def global_mask(scores_BNS: Tensor, kept_groups: int, routed_BN: Tensor) -> Tensor:
    """Global budget (paper, section 3.4): the best M = n * K (token, group) pairs of each sample, bool [B, N, S].

    ``n`` is the sample's number of routed tokens (``routed_BN``, bool); other tokens keep nothing.
    """
    batch, length, num_groups = scores_BNS.shape
    lowest = torch.finfo(torch.float32).min  # a routed group that scores -inf still comes before unrouted ones
    scores = scores_BNS.float().clamp(min=lowest).masked_fill(~routed_BN[..., None], -torch.inf).reshape(batch, -1)
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    budget_B1 = routed_BN.sum(-1, keepdim=True) * kept_groups
    within = torch.arange(length * num_groups, device=scores.device) < budget_B1
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, within)
    return mask.reshape(batch, length, num_groups)


def straight_through(hard: Tensor, logits: Tensor, learns: Tensor | None = None) -> Tensor:
    """Return the hard mask, exactly, with the gradient of a sigmoid in the backward pass; in ``logits``' dtype.

    READING. The paper (section 3.6, appendix B.1) says "a straight-through estimator" and not whose gradient it passes:
    the sigmoid of each logit is ours. Where ``learns`` is False, the gradient is zero.
    """
    masked: Callable[..., Tensor] = _StraightThrough.apply
    return masked(hard, logits, learns)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hard: Tensor, logits: Tensor, learns: Tensor | None) -> Tensor:
        ctx.save_for_backward(logits, learns)
        return hard.to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, None]:
        logits, learns = ctx.saved_tensors
        slope: Tensor = torch.ops.aten.sigmoid_backward(gradients[0], logits.sigmoid())
        return None, slope if learns is None else slope * learns, None
