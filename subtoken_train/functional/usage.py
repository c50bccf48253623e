"""Statistics of routing's budget: how often each group is kept, how many groups a token keeps, and which tokens.

Legend: B batch, N positions, S value groups. ``routed_BN`` (bool) marks the tokens that count; masks: bool [B, N, S].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from subtoken_train.functional.masks import top_indices


def group_counts(mask_BNS: Tensor, routed_BN: Tensor) -> Tensor:
    """Count the routed tokens that keep each group, int64 [S]."""
    return (mask_BNS & routed_BN[..., None]).sum((0, 1))


def group_usage(mask_BNS: Tensor, routed_BN: Tensor) -> Tensor:
    """Share of the kept (token, group) pairs that falls on each group, [S]; zeros where nothing is kept."""
    counts_S = group_counts(mask_BNS, routed_BN).float()
    return counts_S / counts_S.sum().clamp(min=1)


def usage_entropy(usage_S: Tensor) -> float:
    """Entropy of the usage over log S: 1 where all groups are used alike, 0 where one is."""
    if len(usage_S) == 1:
        return 1.0
    logs = usage_S.clamp(min=1e-12).log()
    return max(0.0, float(-(usage_S * logs).sum() / math.log(len(usage_S))))  # no -0, and no less by rounding


def kept_histogram(mask_BNS: Tensor, routed_BN: Tensor) -> Tensor:
    """Routed tokens by the number of groups that they keep, K_j = 0 to S, int64 [S + 1] (paper, Figure 1a)."""
    return torch.bincount(mask_BNS.sum(-1)[routed_BN], minlength=mask_BNS.shape[-1] + 1)


def by_relevance(mask_BNS: Tensor, relevance_BN: Tensor, routed_BN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Every sample's routed tokens from the most relevant to the least (paper, Figure 1b); ties to the lower index.

    Returns K_j and the relevance in that order; where ``valid_BN`` is False there is no routed token of that rank.
    """
    order_BN = top_indices(relevance_BN.float().masked_fill(~routed_BN, -torch.inf), routed_BN.shape[1])
    kept_BN, relevance_BN = mask_BNS.sum(-1).gather(1, order_BN), relevance_BN.gather(1, order_BN)
    return kept_BN, relevance_BN, routed_BN.gather(1, order_BN)


def best_of_each(scores_BNS: Tensor, mask_BNS: Tensor) -> Tensor:
    """The mask that keeps as many groups of every token as ``mask`` does, but the best-scored; ties as in ``masks``."""
    groups_S = torch.arange(mask_BNS.shape[-1], device=mask_BNS.device)
    within_BNS = groups_S < mask_BNS.sum(-1, keepdim=True)
    order_BNS = top_indices(scores_BNS, mask_BNS.shape[-1])
    return torch.zeros_like(mask_BNS).scatter_(-1, order_BNS, within_BNS)


def shared_pairs(mask_BNS: Tensor, other_BNS: Tensor, routed_BN: Tensor) -> int:
    """(token, group) pairs of routed tokens that both masks keep."""
    return int((mask_BNS & other_BNS & routed_BN[..., None]).sum())


def mask_entropy(mask_BNS: Tensor, routed_BN: Tensor) -> Tensor:
    """Measure how much masks differ between tokens: 0 where all keep the same groups, 1 where all are kept as often.

    The mean over groups of the binary entropy of "a routed token keeps this group", over its largest value at the same
    number of kept pairs.
    """
    share_S = group_counts(mask_BNS, routed_BN).float() / routed_BN.sum().clamp(min=1)
    largest = _binary_entropy(share_S.mean())
    ratio = _binary_entropy(share_S).mean() / largest.clamp(min=1e-12)
    return torch.where(largest > 0, ratio.clamp(max=1), 0.0)


def choice_entropy(logits_BNS: Tensor, routed_BN: Tensor) -> Tensor:
    """Mean entropy of the softmax over a routed token's groups, over log S: 1 undecided, 0 decided (or no token)."""
    if logits_BNS.shape[-1] == 1:
        return logits_BNS.new_zeros(())
    logs_BNS = logits_BNS.float().log_softmax(-1)
    entropy_BN = -(logs_BNS.exp() * logs_BNS).sum(-1) / math.log(logits_BNS.shape[-1])
    return entropy_BN.masked_fill(~routed_BN, 0.0).sum() / routed_BN.sum().clamp(min=1)


def masked_moments(values_BNS: Tensor, routed_BN: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (of the population) over all groups of routed tokens, fp32 scalars; 0 without any."""
    weight_BN1 = routed_BN[..., None].float()
    count = (weight_BN1.sum() * values_BNS.shape[-1]).clamp(min=1)
    values = values_BNS.float()
    mean = (values * weight_BN1).sum() / count
    return mean, (((values - mean) ** 2 * weight_BN1).sum() / count).sqrt()


def _binary_entropy(share: Tensor) -> Tensor:
    return -(torch.xlogy(share, share) + torch.xlogy(1 - share, 1 - share))
