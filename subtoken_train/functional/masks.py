"""Group masks with exact budgets, their product with values, the gradient that passes through them, statistics.

Legend: B batch, N positions, S groups; D model width, V value width d_v = H * d, H key-value heads, d head width, R
query heads per key-value head; h heads that are split apart, g channels of a group in one. Ranking is done in fp32;
ties go to the lower index (group within a token; token, then group, across a sample). ``routed_BN`` (bool) marks the
tokens that count (paper, sections 3.3 to 3.6).
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subtoken_train.functional import causal_attention
from subtoken_train.functional.gather import keep_best
from subtoken_train.functional.groups import expand_group_mask, split_groups
from subtoken_train.types import Layout


def top_indices(scores: Tensor, count: int) -> Tensor:
    """Return indices of the ``count`` largest scores along the last axis, best first; ties go to the lower index."""
    return scores.float().sort(dim=-1, descending=True, stable=True).indices[..., :count]


def fixed_mask(scores_BNS: Tensor, kept_groups: int) -> Tensor:
    """Keep exactly ``kept_groups`` groups of every token, the fixed budget (paper, section 3.3): bool [B, N, S]."""
    return torch.zeros_like(scores_BNS, dtype=torch.bool).scatter_(-1, top_indices(scores_BNS, kept_groups), True)


def counted_mask(scores_BNS: Tensor, count_BN: Tensor) -> Tensor:
    """Keep exactly ``count_BN`` groups (int64, 0 to S) of each token: bool [B, N, S]."""
    order_BNS = top_indices(scores_BNS, scores_BNS.shape[-1])
    within_BNS = torch.arange(scores_BNS.shape[-1], device=scores_BNS.device) < count_BN[..., None]
    return torch.zeros_like(scores_BNS, dtype=torch.bool).scatter_(-1, order_BNS, within_BNS)


def ranked_counts(rank_BN: Tensor, routed_BN: Tensor, kept_groups: int, num_groups: int) -> Tensor:
    """Give each routed token groups by its rank, int64 [B, N], n * K in each sample exactly (ranked budget, ours).

    Rank j of n should get ``high + (low - high) * (j + 0.5) / n``, with ``high = min(S, 2K)`` and ``low = 2K - high``.
    These are rounded down, and what is missing from n * K goes to the best-ranked, one group each.
    """
    high = min(num_groups, 2 * kept_groups)
    low = 2 * kept_groups - high
    n_B1 = routed_BN.sum(-1, keepdim=True)
    # 2n times the ideal count, so that it is whole
    scaled_BN = 2 * n_B1 * high + (low - high) * (2 * rank_BN + 1)
    floor_BN = torch.where(routed_BN, scaled_BN // (2 * n_B1).clamp(min=1), 0)
    return floor_BN + (routed_BN & (rank_BN < (n_B1 * kept_groups - floor_BN.sum(-1, keepdim=True))))


def global_mask(scores_BNS: Tensor, kept_groups: int, routed_BN: Tensor) -> Tensor:
    """Keep a sample's best n * K pairs, the global budget (section 3.4): bool [B, N, S]; n: its routed tokens."""
    routed_BNS = routed_BN[..., None].expand_as(scores_BNS)
    return keep_best(scores_BNS.flatten(1), routed_BNS.flatten(1), routed_BN.sum(-1) * kept_groups).view_as(scores_BNS)


def reach_of(marked_BN: Tensor) -> slice:
    """Return the places from the first to the last that a sample marks; all where the host does not read."""
    if marked_BN.device.type in causal_attention.DEVICES:
        return slice(None)
    marks = marked_BN.any(0).tolist()
    return slice(marks.index(True), len(marks) - marks[::-1].index(True)) if True in marks else slice(0, 0)


def straight_through(hard: Tensor, logits: Tensor, learns: Tensor | None = None) -> Tensor:
    """Return the hard mask, exactly, with the gradient of a sigmoid in the backward pass; in ``logits``' dtype.

    READING. The paper (section 3.6, appendix B.1) says "a straight-through estimator" and not whose gradient it passes:
    the sigmoid of each logit is ours. Where ``learns`` is False, the gradient is zero.
    """
    return apply_group_mask(torch.ones_like(logits), hard, 1, "contiguous", slope=(logits, learns))


def apply_group_mask(
    value_BNV: Tensor,
    mask_BNS: Tensor,
    num_kv_heads: int,
    layout: Layout,
    fill_BV: Tensor | None = None,
    slope: tuple[Tensor, Tensor | None] | None = None,
) -> Tensor:
    """Multiply every group of a value by its mask entry m (paper, section 3.3), in the value's dtype.

    ``slope``: logits and learns of a hard mask without a fill, see ``straight_through``.
    """
    heads, mask_BNS = 1 if layout == "contiguous" else num_kv_heads, mask_BNS.to(value_BNV.dtype)
    groups_BNhSg = torch.unflatten(value_BNV, -1, (heads, mask_BNS.shape[-1], -1))
    masked: Callable[..., Tensor] = _MaskedGroups.apply
    routed_BNhSg = masked(groups_BNhSg, mask_BNS, *(slope or (None, None)))
    if fill_BV is not None:
        fill_B1hSg = fill_BV.to(value_BNV.dtype).reshape(-1, 1, *groups_BNhSg.shape[2:])
        routed_BNhSg = routed_BNhSg + (1 - mask_BNS[..., None, :, None]) * fill_B1hSg
    return routed_BNhSg.flatten(-3)


class _MaskedGroups(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, groups: Tensor, mask: Tensor, *slope: Tensor | None) -> Tensor:
        ctx.save_for_backward(groups if slope[0] is not None or mask.requires_grad else None, mask, *slope)
        return groups * mask[..., None, :, None]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        groups, mask, logits, learns = ctx.saved_tensors
        of_groups, of_mask = gradients[0] * mask[..., None, :, None], None
        if logits is not None or ctx.needs_input_grad[1]:
            of_mask = (gradients[0] * groups).sum((2, 4))
        if logits is None or of_mask is None:
            return of_groups, of_mask, None, None
        slope = torch.ops.aten.sigmoid_backward(of_mask.to(logits.dtype), logits.sigmoid())
        return of_groups, None, slope if learns is None else slope * learns, None


def group_counts(mask_BNS: Tensor, routed_BN: Tensor) -> Tensor:
    """Count the routed tokens that keep each group, int64 [S]."""
    return (mask_BNS & routed_BN[..., None]).sum((0, 1))


def group_usage(mask_BNS: Tensor, routed_BN: Tensor) -> Tensor:
    """Return the share of the kept (token, group) pairs that falls on each group, [S]; zeros where nothing is kept."""
    counts_S = group_counts(mask_BNS, routed_BN).float()
    return counts_S / counts_S.sum().clamp(min=1)


def usage_entropy(usage_S: Tensor) -> float:
    """Return the entropy of the usage over log S: 1 where all groups are used alike, 0 where one is."""
    if len(usage_S) == 1:
        return 1.0
    logs = usage_S.clamp(min=1e-12).log()
    return max(0.0, float(-(usage_S * logs).sum() / math.log(len(usage_S))))  # no -0, and no less by rounding


def kept_histogram(mask_BNS: Tensor, routed_BN: Tensor) -> Tensor:
    """Count routed tokens by the number of groups that they keep, K_j = 0 to S, int64 [S + 1] (paper, Figure 1a)."""
    return torch.bincount(mask_BNS.sum(-1)[routed_BN], minlength=mask_BNS.shape[-1] + 1)


def by_relevance(mask_BNS: Tensor, relevance_BN: Tensor, routed_BN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sort each sample's K_j and relevance by relevance (Figure 1b), and mark which ranks are there."""
    order_BN = top_indices(relevance_BN.float().masked_fill(~routed_BN, -torch.inf), routed_BN.shape[1])
    kept_BN, relevance_BN = mask_BNS.sum(-1).gather(1, order_BN), relevance_BN.gather(1, order_BN)
    return kept_BN, relevance_BN, routed_BN.gather(1, order_BN)


def mask_entropy(mask_BNS: Tensor, routed_BN: Tensor) -> Tensor:
    """Measure how much masks differ between tokens: 0 where all keep the same groups, 1 where all are kept as often.

    The mean over groups of the binary entropy of "a routed token keeps this group", over its largest value at the same
    number of kept pairs.
    """
    share_S = group_counts(mask_BNS, routed_BN).float() / routed_BN.sum().clamp(min=1)
    largest = _binary_entropy(share_S.mean())
    return torch.where(largest > 0, (_binary_entropy(share_S).mean() / largest.clamp(min=1e-12)).clamp(max=1), 0.0)


def choice_entropy(logits_BNS: Tensor, routed_BN: Tensor) -> Tensor:
    """Return the mean softmax entropy over a token's groups, over log S: 1 undecided, 0 decided (or no token)."""
    if logits_BNS.shape[-1] == 1:
        return logits_BNS.new_zeros(())
    logs_BNS = logits_BNS.float().log_softmax(-1)
    entropy_BN = -(logs_BNS.exp() * logs_BNS).sum(-1) / math.log(logits_BNS.shape[-1])
    return entropy_BN.masked_fill(~routed_BN, 0.0).sum() / routed_BN.sum().clamp(min=1)


def _binary_entropy(share: Tensor) -> Tensor:
    return -(torch.xlogy(share, share) + torch.xlogy(1 - share, 1 - share))


_LEAST_NORM = 1e-6  # added to norms, so that an empty group has a logarithm
_LEAST_DEVIATION = 1e-4  # equal norms differ by rounding, which must not be blown up


def head_grams(output_weight: Tensor, num_kv_heads: int, head_dim: int, num_groups: int, layout: Layout) -> Tensor:
    """Return Gram matrices sum_q W_q^T W_q of a key-value head's query heads, fp32 [H, d, d], 0 between groups."""
    columns_DHRd = torch.unflatten(output_weight.float(), -1, (num_kv_heads, -1, head_dim))
    with torch.autocast(output_weight.device.type, enabled=False):
        gram_Hdd = torch.einsum("xhrd,xhre->hde", columns_DHRd, columns_DHRd)
    group_of_S = torch.arange(num_groups, device=output_weight.device)
    group_of_V = expand_group_mask(group_of_S, num_kv_heads * head_dim, num_kv_heads, layout)
    group_of_Hd = group_of_V.reshape(num_kv_heads, head_dim)
    return gram_Hdd.masked_fill(group_of_Hd[:, :, None] != group_of_Hd[:, None, :], 0)


def contribution_norms(value_BNV: Tensor, gram_Hdd: Tensor, num_groups: int, layout: Layout) -> Tensor:
    """Return the root of the sum over query heads of ||W_q,g v_g||^2, fp32 [B, N, S], without cross-head products."""
    num_kv_heads, head_dim = gram_Hdd.shape[:2]
    value_BNHd = torch.unflatten(value_BNV.float(), -1, (num_kv_heads, head_dim))
    with torch.autocast(value_BNV.device.type, enabled=False):
        shares_BNV = (value_BNHd * torch.einsum("bnhd,hde->bnhe", value_BNHd, gram_Hdd)).flatten(-2)
    squared_BNS = split_groups(shares_BNV, num_groups, num_kv_heads, layout).sum(-1)
    return squared_BNS.clamp(min=0).sqrt()  # rounding may leave a tiny negative sum


@torch.no_grad()
def standardised_log(norms_BNS: Tensor, routed_BN: Tensor) -> Tensor:
    """Return ``log(norm)``, mean 0, deviation 1 over a sample's routed pairs, fp32 [B, N, S], else 0; no gradient."""
    unrouted_BN1 = ~routed_BN[..., None]
    pairs_B11 = (routed_BN.sum(-1) * norms_BNS.shape[-1]).clamp(min=1)[:, None, None]
    logs_BNS = (norms_BNS.float() + _LEAST_NORM).log().masked_fill(unrouted_BN1, 0)
    centred_BNS = (logs_BNS - logs_BNS.sum((1, 2), keepdim=True) / pairs_B11).masked_fill(unrouted_BN1, 0)
    deviation_B11 = (centred_BNS.square().sum((1, 2), keepdim=True) / pairs_B11).sqrt()
    return centred_BNS / deviation_B11.clamp(min=_LEAST_DEVIATION)
