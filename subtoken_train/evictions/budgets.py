"""Divide a sample's cache entries between its layers, in whole numbers whose sum is exact.

By claims of the layers (``divide_budget``), or from one pool: the best entries of all layers, or of all their heads,
say how many each of them keeps (equations 17 to 22 of "KVCompose", where a run is a layer; KVzip has a run a head).

Legend: B batch, N cached rows of the prompt, h key-value heads, L layers, R runs that share a pool (layers, or heads).
"""

from typing import Literal

import torch
from torch import Tensor

from subtoken_train.view.scores import Candidates, Scores

Pool = Literal["global", "layer", "head"]
"""Heads that share a budget: those of all layers, those of a layer, or each its own."""
FAINTEST = 1e-9  # share of a sample's largest weight that every layer has at least, so that any total can be placed
PYRAMID_BETA = 20  # PyramidKV's: the last layer gets 1 / 20 of the mean budget
GRAIN = 1e6  # remainders closer than 1 / GRAIN are ties


def competing_counts(candidates: Candidates) -> Tensor:
    """Count the entries that compete, int64 [L, B]: the most that a layer can keep of them."""
    return torch.stack([competes_BN.sum(-1) for competes_BN in candidates.competes_LBN])


def divided(weight_LB: Tensor, candidates: Candidates, least: float = 0.0) -> Tensor:
    """Divide the whole budget by weights; a layer keeps the share ``least`` of its entries, and one at least."""
    budget_LB, most_LB = candidates.budget_LB, competing_counts(candidates)
    least_LB = torch.minimum((least * most_LB).long(), budget_LB).clamp(min=1)
    return divide_budget(weight_LB, budget_LB.sum(0), least_LB, most_LB)


def claims(scores: list[Scores]) -> Tensor:
    """Return the claims of the layers, fp32 [L, B]."""
    return torch.stack([each.weight_B for each in scores if each.weight_B is not None])


def protected_counts(scores: list[Scores], candidates: Candidates) -> Tensor:
    """Count the entries that compete and are protected, int64 [L, B]."""
    layers = zip(scores, candidates.competes_LBN, strict=True)
    return torch.stack([(layer.protected_BN & competes_BN).sum(-1) for layer, competes_BN in layers])


def pyramid_weights(like_LB: Tensor) -> Tensor:
    """Return PyramidKV's line over whole budgets, falling from the first layer, fp32 [L, B], mean 1."""
    first, last = 2 - 1 / PYRAMID_BETA, 1 / PYRAMID_BETA
    falling_L = torch.linspace(first, last, len(like_LB), device=like_LB.device)
    if len(like_LB) == 1:
        falling_L = torch.ones_like(falling_L)
    return falling_L[:, None].expand(like_LB.shape)


def divide_budget(weight_LB: Tensor, total_B: Tensor, least_LB: Tensor, most_LB: Tensor) -> Tensor:
    """Divide ``total_B`` entries between layers by weight, int64 [L, B].

    Every layer gets ``factor * weight``, but not less than ``least_LB`` and not more than ``most_LB``; the factor is
    the one that spends the total. Rounded down, and the missing entries go to the largest remainders, ties to the lower
    layer. In float64 on the CPU: not every device has float64.

    Args:
        weight_LB: 0 or more, finite; layers of weight 0 share equally what no other layer can take.
        total_B: int64; less than the sum of ``least_LB`` spends that sum instead, more than that of ``most_LB`` that.
        least_LB: entries that a layer gets in any case, int64; ``most_LB`` where that is less.
        most_LB: entries that a layer can take, int64.
    """
    device = weight_LB.device
    weight_LB, total_B, least_LB, most_LB = (each.cpu() for each in (weight_LB, total_B, least_LB, most_LB))
    assert bool((weight_LB.isfinite() & (weight_LB >= 0)).all())
    least_LB = torch.minimum(least_LB, most_LB)
    total_B = torch.minimum(torch.maximum(total_B, least_LB.sum(0)), most_LB.sum(0))
    share_LB = _real_shares(weight_LB.double(), total_B, least_LB, most_LB)
    nearest_LB = share_LB.round()
    share_LB = torch.where((share_LB - nearest_LB).abs() < 1 / GRAIN, nearest_LB, share_LB)
    floor_LB = share_LB.floor()
    rank_LB = ((share_LB - floor_LB) * GRAIN).round().sort(dim=0, descending=True, stable=True).indices.argsort(dim=0)
    count_LB = floor_LB.long()
    return (count_LB + (rank_LB < total_B - count_LB.sum(0))).to(device)


def _real_shares(weight_LB: Tensor, total_B: Tensor, least_LB: Tensor, most_LB: Tensor) -> Tensor:
    """``clamp(factor * weight, least, most)``, float64 [L, B]; interpolated between factors that meet a bound."""
    largest_B = weight_LB.amax(0)
    weight_LB = torch.where(largest_B > 0, torch.maximum(weight_LB, FAINTEST * largest_B), 1.0)
    factor_PB = torch.cat([least_LB / weight_LB, most_LB / weight_LB]).sort(dim=0).values
    spent_PB = (factor_PB[:, None] * weight_LB).clamp(least_LB, most_LB).sum(1)
    after_1B = (spent_PB < total_B).sum(0, keepdim=True).clamp(min=1, max=len(factor_PB) - 1)
    (low_1B, high_1B), (spent_low_1B, spent_high_1B) = (
        (each_PB.gather(0, after_1B - 1), each_PB.gather(0, after_1B)) for each_PB in (factor_PB, spent_PB)
    )
    part_1B = (total_B - spent_low_1B) / (spent_high_1B - spent_low_1B).clamp(min=1e-300)
    return ((low_1B + part_1B.clamp(0, 1) * (high_1B - low_1B)) * weight_LB).clamp(least_LB, most_LB)


def pooled_head_counts(
    scores: list[Tensor], candidates: Candidates, lower_bound: int, total_B: Tensor | None = None
) -> Tensor:
    """Divide one pool among all heads of all layers: entries per layer and head, int64 [L, B, h].

    The budget of a layer is that of each of its heads, unless ``total_B`` of all heads together is given. Heads of a
    sample may be rows of the batch (``Candidates.heads``). Unless ``lower_bound`` is 0, every head keeps one at least.
    """
    rows, kv_heads = scores[0].shape[:2]
    heads = candidates.heads * kv_heads
    if total_B is None:
        total_B = candidates.budget_LB[:, :: candidates.heads].sum(0) * heads
    curves = [each.view(-1, heads, each.shape[-1]) for each in score_curves(scores, candidates)]
    count_BR = pooled_counts(aligned(curves), total_B, lower_bound)
    count_LBh = count_BR.view(-1, len(scores), heads).transpose(0, 1).reshape(len(scores), rows, kv_heads)
    return torch.maximum(count_LBh, competing_counts(candidates).clamp(max=min(1, lower_bound))[..., None])


def counts_of_pool(scores: list[Tensor], candidates: Candidates, pool: Pool, lower_bound: int) -> Tensor:
    """Divide a pool: entries per layer and head, int64 [L, B, h]; [L, B] where each head has its own budget."""
    if pool == "head":
        return candidates.budget_LB
    if pool == "global":
        return pooled_head_counts(scores, candidates, lower_bound)
    regions, competes, heads = candidates.regions_LBN, candidates.competes_LBN, candidates.heads
    budgets = candidates.budget_LB[:, None].unbind(0)
    alone = [Candidates([x], [y], own, heads=heads) for x, y, own in zip(regions, competes, budgets, strict=True)]
    return torch.cat([pooled_head_counts([x], own, lower_bound) for x, own in zip(scores, alone, strict=True)])


def protected_first(scores: Scores) -> Tensor:
    """Return the scores by which a pool counts, [B, h, N] in fp32: infinite where a method protects an entry."""
    limits = torch.finfo(torch.float32)
    return scores.scores_BhN.float().clamp(limits.min, limits.max).masked_fill(scores.protected_BN[:, None], torch.inf)


def score_curves(scores: list[Tensor], candidates: Candidates) -> list[Tensor]:
    """Return every layer's ``score_curve``."""
    return [score_curve(each, competes) for each, competes in zip(scores, candidates.competes_LBN, strict=True)]


def score_curve(scores_BhN: Tensor, competes_BN: Tensor) -> Tensor:
    """Sort the scores of each head's competing entries, best first (equation 18), [B, h, N]; -inf after the last."""
    return scores_BhN.masked_fill(~competes_BN[:, None], -torch.inf).sort(dim=-1, descending=True).values


def aligned(curves: list[Tensor]) -> Tensor:
    """Join all layers' curves [B, R_l, N_l] into [B, sum of R_l, largest N_l], filled up with -inf."""
    length = max(each.shape[-1] for each in curves)
    return torch.cat(
        [torch.nn.functional.pad(each, (0, length - each.shape[-1]), value=-torch.inf) for each in curves], 1
    )


def pooled_counts(curve_BRN: Tensor, total_B: Tensor, lower_bound: int) -> Tensor:
    """Count the entries of each run that are among the ``total_B`` best of all (equations 20 to 22), int64 [B, R].

    The first ``lower_bound`` entries of each run come before all others, the very first before those; ties go to the
    lower run. ``curve_BRN`` fall, -inf after the last entry.
    """
    batch, runs, length = curve_BRN.shape
    flat = curve_BRN.reshape(batch, -1)
    place = torch.arange(runs * length, device=flat.device) % length
    early = (place < lower_bound).int() + (place < min(lower_bound, 1)).int()
    order = flat.sort(dim=-1, descending=True, stable=True).indices
    classes = torch.where(flat.isneginf(), -1, early).gather(-1, order)
    order = order.gather(-1, classes.sort(dim=-1, descending=True, stable=True).indices)
    within = torch.arange(runs * length, device=flat.device) < total_B[:, None]
    return (torch.zeros_like(within).scatter_(-1, order, within) & ~flat.isneginf()).view(batch, runs, length).sum(-1)
