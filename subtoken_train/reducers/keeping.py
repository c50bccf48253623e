"""Which rows stay where visual tokens are ranked.

Legend: B batch, N positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subtoken_train.functional.gather import keep_best, rank_candidates
from subtoken_train.types import Region


def keep_ranked(
    scores_BN: Tensor, regions_BN: Tensor, read_BN: Tensor, count_B: Tensor, ranks: bool, merges: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The best visual tokens of each sample and all other real ones; see ``RankingReducer.select``.

    Args:
        scores_BN: the highest stay; ties go to the lower index.
        regions_BN: ``Region`` codes.
        read_BN: rows that a token is read from; visual ones stay, inside the budget.
        count_B: visual tokens that stay, int64.
        ranks: whether ranks are asked for.
        merges: whether what is dropped goes on as one token.
    """
    visual_BN = regions_BN == Region.VISUAL
    read_BN = visual_BN & read_BN
    count_B = torch.maximum(count_B, read_BN.sum(-1))
    kept_visual_BN = keep_best(scores_BN.masked_fill(read_BN, torch.inf), visual_BN, count_B)
    keep_BN = kept_visual_BN | (~visual_BN & (regions_BN != Region.PADDING))
    rank_BN = rank_candidates(scores_BN, kept_visual_BN) if ranks else None
    if not merges:
        return keep_BN, rank_BN, None
    slot_BN = merge_slot(scores_BN, kept_visual_BN, kept_visual_BN & ~read_BN, visual_BN)
    joins_BN = merge_joins(slot_BN, visual_BN & ~kept_visual_BN)
    return keep_BN, None if rank_BN is None else last_ranked(rank_BN, kept_visual_BN, slot_BN), joins_BN


def merge_slot(scores_BN: Tensor, kept_BN: Tensor, free_BN: Tensor, visual_BN: Tensor) -> Tensor:
    """The row of each sample that holds the mean of what was dropped, bool [B, N]: the worst of those that may.

    It is the best of what one token fewer would drop. No row where nothing is dropped, and where every row that stays
    is one that a token is read from.

    Args:
        scores_BN: of the ranking.
        kept_BN: visual tokens that stay, bool.
        free_BN: those among them that may become a mean, bool.
        visual_BN: all visual tokens, bool.
    """
    place_BN = rank_candidates(scores_BN, free_BN)
    dropped_B1 = (visual_BN & ~kept_BN).any(-1, keepdim=True)
    return free_BN & (place_BN == free_BN.sum(-1, keepdim=True) - 1) & dropped_B1


def merge_joins(slot_BN: Tensor, dropped_BN: Tensor) -> Tensor:
    """The row that each row joins, int64 [B, N]: of dropped ones the sample's slot, where it has one; else itself."""
    rows_BN = torch.arange(slot_BN.shape[1], device=slot_BN.device).expand(slot_BN.shape)
    goes_BN = dropped_BN & slot_BN.any(-1, keepdim=True)
    return torch.where(goes_BN, slot_BN.long().argmax(-1, keepdim=True), rows_BN)


def last_ranked(rank_BN: Tensor, kept_BN: Tensor, slot_BN: Tensor) -> Tensor:
    """The ranks of the kept tokens with the merged one as their last, int64 [B, N]; the others' order stays."""
    slot_rank_B1 = rank_BN.masked_fill(~slot_BN, -1).amax(-1, keepdim=True)
    closed_BN = rank_BN - ((slot_rank_B1 >= 0) & (rank_BN > slot_rank_B1)).long()
    return torch.where(slot_BN, kept_BN.sum(-1, keepdim=True) - 1, closed_BN)
