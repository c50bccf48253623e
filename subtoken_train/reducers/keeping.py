"""Which rows stay where visual tokens are ranked.

Legend: B batch, N positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subtoken_train.functional.gather import keep_best, rank_candidates
from subtoken_train.types import Region


def keep_ranked(
    scores_BN: Tensor, regions_BN: Tensor, read_BN: Tensor, count_B: Tensor, ranks: bool
) -> tuple[Tensor, Tensor | None]:
    """The best visual tokens of each sample and all other real ones; see ``RankingReducer.select``.

    Args:
        scores_BN: the highest stay; ties go to the lower index.
        regions_BN: ``Region`` codes.
        read_BN: rows that a token is read from; visual ones stay, inside the budget.
        count_B: visual tokens that stay, int64.
        ranks: whether ranks are asked for.
    """
    visual_BN = regions_BN == Region.VISUAL
    read_BN = visual_BN & read_BN
    count_B = torch.maximum(count_B, read_BN.sum(-1))
    kept_visual_BN = keep_best(scores_BN.masked_fill(read_BN, torch.inf), visual_BN, count_B)
    keep_BN = kept_visual_BN | (~visual_BN & (regions_BN != Region.PADDING))
    return keep_BN, rank_candidates(scores_BN, kept_visual_BN) if ranks else None
