"""One pool for many: the best entries of all layers, or of all their heads, say how many each of them keeps.

Source: equations 17 to 22 of "KVCompose" (a run is a layer there); KVzip's threshold over all layers and heads is the
same with every head a run.

Legend: B batch, N cached rows of the prompt, h key-value heads, L layers, R runs that share a pool (layers, or heads of
layers).
"""

from __future__ import annotations

import torch
from torch import Tensor

from subtoken_train.evictions.base import Candidates
from subtoken_train.evictions.budgets import competing_counts


def pooled_head_counts(
    scores: list[Tensor], candidates: Candidates, lower_bound: int, total_B: Tensor | None = None
) -> Tensor:
    """Entries per layer and head, int64 [L, B, h], from one pool of all heads of all layers.

    Args:
        scores: of every layer, [B, h, N].
        candidates: the budget of a layer is that of each of its heads.
        lower_bound: see ``pooled_counts``; unless it is 0, every head keeps one at least.
        total_B: entries of all heads together; h times the budgets if not given.
    """
    kv_heads = scores[0].shape[1]
    if total_B is None:
        total_B = candidates.budget_LB.sum(0) * kv_heads
    count_BR = pooled_counts(aligned(score_curves(scores, candidates)), total_B, lower_bound)
    count_LBh = count_BR.view(-1, len(scores), kv_heads).transpose(0, 1)
    return torch.maximum(count_LBh, competing_counts(candidates).clamp(max=min(1, lower_bound))[..., None])


def score_curves(scores: list[Tensor], candidates: Candidates) -> list[Tensor]:
    """``score_curve`` of every layer."""
    return [score_curve(each, competes) for each, competes in zip(scores, candidates.competes_LBN, strict=True)]


def score_curve(scores_BhN: Tensor, competes_BN: Tensor) -> Tensor:
    """Scores of the competing entries of each head, best first (equation 18), [B, h, N]; -inf after the last."""
    return scores_BhN.masked_fill(~competes_BN[:, None], -torch.inf).sort(dim=-1, descending=True).values


def aligned(curves: list[Tensor]) -> Tensor:
    """Curves [B, R_l, N_l] of all layers in one tensor [B, sum of R_l, largest N_l], -inf after the last entry."""
    length = max(each.shape[-1] for each in curves)
    return torch.cat(
        [torch.nn.functional.pad(each, (0, length - each.shape[-1]), value=-torch.inf) for each in curves], 1
    )


def pooled_counts(curve_BRN: Tensor, total_B: Tensor, lower_bound: int) -> Tensor:
    """How many of each run are among the best of all (equations 20 to 22), int64 [B, R].

    Args:
        curve_BRN: falling curves of importance, -inf after the last entry.
        total_B: size of the selection, int64.
        lower_bound: the first entries of each run, which come before all others; the very first before those.

    Ties go to the lower run.
    """
    batch, runs, length = curve_BRN.shape
    flat = curve_BRN.reshape(batch, -1)
    place = torch.arange(runs * length, device=flat.device) % length
    early = (place < lower_bound).int() + (place < min(lower_bound, 1)).int()
    order = flat.sort(dim=-1, descending=True, stable=True).indices
    classes = torch.where(flat.isneginf(), -1, early).gather(-1, order)
    order = order.gather(-1, classes.sort(dim=-1, descending=True, stable=True).indices)
    within = torch.arange(runs * length, device=flat.device) < total_B[:, None]
    chosen = torch.zeros_like(within).scatter_(-1, order, within) & ~flat.isneginf()
    return chosen.view(batch, runs, length).sum(-1)
