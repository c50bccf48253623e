"""Dividing a sample's cache entries between its layers, in whole numbers whose sum is exact.

Legend: L layers, B batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subtoken_train.evictions.base import Candidates

FAINTEST = 1e-9  # share of a sample's largest weight that every layer has at least, so that any total can be placed
PYRAMID_BETA = 20  # PyramidKV's: the last layer gets 1 / 20 of the mean budget
GRAIN = 1e6  # remainders closer than 1 / GRAIN are ties


def competing_counts(candidates: Candidates) -> Tensor:
    """Entries that compete, int64 [L, B]: the most that a layer can keep of them."""
    return torch.stack([competes_BN.sum(-1) for competes_BN in candidates.competes_LBN])


def pyramid_weights(like_LB: Tensor) -> Tensor:
    """Claims that fall linearly from the first layer to the last, fp32 [L, B]; their mean over the layers is 1.

    PyramidKV's line over whole budgets; that method itself (``pyramidkv.py``) counts its window beside it.
    """
    first, last = 2 - 1 / PYRAMID_BETA, 1 / PYRAMID_BETA
    falling_L = torch.linspace(first, last, len(like_LB), device=like_LB.device)
    if len(like_LB) == 1:
        falling_L = torch.ones_like(falling_L)
    return falling_L[:, None].expand(like_LB.shape)


def divide_budget(weight_LB: Tensor, total_B: Tensor, least_LB: Tensor, most_LB: Tensor) -> Tensor:
    """Divide ``total_B`` entries between layers by weight, int64 [L, B].

    Every layer gets ``factor * weight``, but not less than ``least_LB`` and not more than ``most_LB``; the factor is
    the one that spends the total, so what one layer cannot take goes to the others by their weights. Rounded down, and
    the missing entries go to the largest remainders, ties to the lower layer.

    Args:
        weight_LB: claims of the layers, 0 or more, finite; all 0 in a sample counts as all equal, and layers of weight
            0 share equally what no other layer can take.
        total_B: entries to spend, int64. Less than the sum of ``least_LB`` spends that sum instead, and more than the
            sum of ``most_LB`` spends that.
        least_LB: entries that a layer gets in any case, int64; ``most_LB`` where that is less.
        most_LB: entries that a layer can take, int64.

    In float64 on the CPU: a batch has few of these numbers, and not every device has float64.
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
    order_LB = ((share_LB - floor_LB) * GRAIN).round().sort(dim=0, descending=True, stable=True).indices
    rank_LB = order_LB.argsort(dim=0)
    count_LB = floor_LB.long()
    return (count_LB + (rank_LB < total_B - count_LB.sum(0))).to(device)


def _real_shares(weight_LB: Tensor, total_B: Tensor, least_LB: Tensor, most_LB: Tensor) -> Tensor:
    """``clamp(factor * weight, least, most)`` whose sum over the layers is the total, float64 [L, B].

    The sum rises with the factor and is linear between the factors at which a layer reaches one of its bounds: it is
    evaluated at all of those and interpolated.
    """
    largest_B = weight_LB.amax(0)
    weight_LB = torch.where(largest_B > 0, torch.maximum(weight_LB, FAINTEST * largest_B), 1.0)
    factor_PB = torch.cat([least_LB / weight_LB, most_LB / weight_LB]).sort(dim=0).values
    spent_PB = (factor_PB[:, None] * weight_LB).clamp(least_LB, most_LB).sum(1)
    after_1B = (spent_PB < total_B).sum(0, keepdim=True).clamp(min=1, max=len(factor_PB) - 1)
    (low_1B, high_1B), (spent_low_1B, spent_high_1B) = (
        (each_PB.gather(0, after_1B - 1), each_PB.gather(0, after_1B)) for each_PB in (factor_PB, spent_PB)
    )
    part_1B = (total_B - spent_low_1B) / (spent_high_1B - spent_low_1B).clamp(min=1e-300)
    factor_1B = low_1B + part_1B.clamp(0, 1) * (high_1B - low_1B)
    return (factor_1B * weight_LB).clamp(least_LB, most_LB)
