"""Group masks with exact budgets.

Legend: B batch, N positions, S groups. Scores may be any real dtype; ranking is done in fp32. Ties go to the lower
index (group within a token; token, then group, across a sample), and a mask never keeps more than its budget.
"""

from __future__ import annotations

import torch
from torch import Tensor


def top_indices(scores: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` largest scores along the last axis, best first; ties go to the lower index."""
    return scores.float().sort(dim=-1, descending=True, stable=True).indices[..., :count]


def fixed_mask(scores_BNS: Tensor, kept_groups: int) -> Tensor:
    """Fixed budget (paper, section 3.3): bool [B, N, S] with exactly ``kept_groups`` True per token."""
    mask_BNS = torch.zeros_like(scores_BNS, dtype=torch.bool)
    return mask_BNS.scatter_(-1, top_indices(scores_BNS, kept_groups), True)


def global_mask(scores_BNS: Tensor, kept_groups: int, routed_BN: Tensor) -> Tensor:
    """Global budget (paper, section 3.4): the best M = n * K (token, group) pairs of each sample.

    ``n`` is the sample's number of routed tokens (``routed_BN``, bool [B, N]); other tokens, padding among them, keep
    nothing here. Returns bool [B, N, S]; a token may keep 0 to S groups.
    """
    batch, length, num_groups = scores_BNS.shape
    lowest = torch.finfo(torch.float32).min  # a routed group that scores -inf still comes before unrouted ones
    scores = scores_BNS.float().clamp(min=lowest).masked_fill(~routed_BN[..., None], -torch.inf).reshape(batch, -1)
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    budget_B1 = routed_BN.sum(-1, keepdim=True) * kept_groups
    within = torch.arange(length * num_groups, device=scores.device) < budget_B1
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, within)
    return mask.reshape(batch, length, num_groups)
