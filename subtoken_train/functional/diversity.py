"""Choosing rows that are unlike each other: greedy max-min distance, greedy determinants, least like a few, no doubles.

Likeness is the cosine, in fp32. The batched functions return the place in which each row was chosen: 0 is the first,
``steps`` stands for rows that were not. What differs by less than ``SAME`` counts as alike, and then the lowest index
is chosen. Legend: B batch, N rows, D width, R rows of one picture.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from subtoken_train.functional.gather import keep_best, plain_product, rank_candidates
from subtoken_train.functional.masks import top_indices

SAME = 1e-6  # cosine distances and remaining volumes below it are 0
_BLOCK = 256
_MATCHED_AT_ONCE = 8


def unit_rows(rows: Tensor) -> Tensor:
    """Scale rows along the last axis to length 1, in fp32; rows of zeros stay."""
    return F.normalize(rows.float(), dim=-1)


def farthest_places(unit_BND: Tensor, open_BN: Tensor, steps: int) -> Tensor:
    """Choose row after row the one whose nearest chosen (first: other) row is farthest away, int64 [B, N]."""
    place_BN, nearest = torch.full(open_BN.shape, steps, device=open_BN.device), []
    for start in range(0, open_BN.shape[1], _BLOCK):
        like_BrN = plain_product(unit_BND[:, start : start + _BLOCK], unit_BND.mT)
        like_BrN = like_BrN.masked_fill(~open_BN[:, None], -torch.inf)
        like_BrN.diagonal(start, 1, 2).fill_(-torch.inf)  # the nearest other row
        nearest.append(1 - like_BrN.amax(-1))
    nearest_BN = _zeroed(torch.cat(nearest, 1))
    largest_B1 = nearest_BN.masked_fill(~open_BN, 0).amax(-1, keepdim=True)
    nearest_BN = (nearest_BN >= largest_B1 - SAME).float()  # of two that are each other's nearest the first
    for step in range(steps):
        distance_BN = _zeroed(1 - _likeness(unit_BND, _choose(nearest_BN, open_BN, place_BN, step)))
        nearest_BN = distance_BN if step == 0 else torch.minimum(nearest_BN, distance_BN)
    return place_BN


def volume_places(unit_BND: Tensor, weight_BN: Tensor, open_BN: Tensor, steps: int) -> Tensor:
    """Choose row after row the one that makes the determinant of the chosen rows' kernel largest, int64 [B, N].

    The kernel is ``weight_i * cosine_ij * weight_j``: greedy MAP inference of its k-DPP (Chen et al., 2018,
    arXiv:1709.05135, algorithm 1), by the Cholesky factor of the cosines alone, which are better conditioned.
    """
    place_BN = torch.full(open_BN.shape, steps, device=open_BN.device)
    left_BN = unit_BND.any(-1).float()  # squared length outside the span of the chosen rows
    factor_BkN = unit_BND.new_zeros(len(unit_BND), steps, unit_BND.shape[1])
    square_BN = weight_BN.float().square()
    for step in range(steps):
        row_B1 = _choose(square_BN * left_BN, open_BN, place_BN, step)
        explained_BN = plain_product(factor_BkN.gather(2, row_B1[:, None].expand(-1, steps, 1)).mT, factor_BkN)[:, 0]
        rest_B1 = left_BN.gather(1, row_B1)
        direction_BN = (_likeness(unit_BND, row_B1) - explained_BN) * rest_B1.clamp(min=SAME).rsqrt()
        factor_BkN[:, step] = direction_BN.masked_fill(rest_B1 < SAME, 0)
        left_BN = _zeroed(left_BN - factor_BkN[:, step].square())
    return place_BN


def unlike_places(
    unit_BND: Tensor, pivots_BP: Tensor, open_BN: Tensor, quota_BP: Tensor, taken_B1: Tensor, steps: int
) -> Tensor:
    """Choose, pivot after pivot, its quota of the open rows least like it, from place ``taken_B1`` on, int64 [B, N]."""
    place_BN = torch.full(open_BN.shape, steps, device=open_BN.device)
    for pivot in range(pivots_BP.shape[1]):
        unlike_BN = -_likeness(unit_BND, pivots_BP[:, pivot : pivot + 1])
        taken_BN = keep_best(unlike_BN, open_BN, quota_BP[:, pivot])
        place_BN = torch.where(taken_BN, taken_B1 + rank_candidates(unlike_BN, open_BN), place_BN)
        taken_B1 = taken_B1 + taken_BN.sum(-1, keepdim=True)
        open_BN = open_BN & ~taken_BN
    return place_BN


def without_doubles(unit_RD: Tensor, count: int) -> Tensor:
    """Return the indices of ``count`` rows (at least 1) that are left when the most alike went, int64.

    Every other row is matched with the most similar of those between; of the 8 most similar pairs the former goes.
    """
    like_RR = plain_product(unit_RD, unit_RD.T)
    left = torch.arange(len(unit_RD), device=unit_RD.device)
    while len(left) > count:
        first, second = left[::2], left[1::2]
        gone = min(_MATCHED_AT_ONCE, len(left) - count, len(first))
        left = torch.cat([first[top_indices(like_RR[first][:, second].amax(-1), len(first))[gone:]], second])
    return left


def _choose(value_BN: Tensor, open_BN: Tensor, place_BN: Tensor, step: int) -> Tensor:
    """Return each sample's open row of the highest value, [B, 1], its place noted; any row where none is open."""
    open_BN = open_BN & (place_BN >= step)
    row_B1 = value_BN.masked_fill(~open_BN, -torch.inf).argmax(-1, keepdim=True)  # of equals the first
    place_BN.scatter_(1, row_B1, torch.where(open_BN.gather(1, row_B1), step, place_BN.gather(1, row_B1)))
    return row_B1


def _likeness(unit_BND: Tensor, row_B1: Tensor) -> Tensor:
    return plain_product(unit_BND, unit_BND.gather(1, row_B1[..., None].expand(-1, -1, unit_BND.shape[-1])).mT)[..., 0]


def _zeroed(values: Tensor) -> Tensor:
    return values.masked_fill(values < SAME, 0)
