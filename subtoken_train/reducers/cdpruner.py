"""CDPruner (Zhang et al., 2025, arXiv:2506.10967): keep diverse visual tokens, given what the instruction asks.

As released (Theia-4869/CDPruner @9541616): a determinantal point process over the visual tokens has the kernel r_i
cos_ij r_j of their projected features; its greedy MAP set stays. The relevance r is the *negative* mean cosine to the
text's embeddings, min-max scaled to [0, 1] with 1e-6 added to the numerator; the paper's exponent theta is off, as it
is there.

A reconstruction in one point: the release takes r from CLIP's own text tower, which no LLaVA checkpoint holds. Here, in
every family, it is of the projected features and the question's input embeddings, as in OpenVINO's port
(openvino_contrib @98c5fe8), with the same sign. Without a question r = 1: diversity alone. What differs besides:
relevance is scaled per sample, all images of a sample are pruned together, kept tokens keep their positions; once the
chosen tokens span all others the lowest index is next (the release divides by zero). The last token of a prompt that
ends with its image stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from subtoken_train.functional.diversity import SAME, unit_rows, volume_places
from subtoken_train.functional.gather import masked_mean
from subtoken_train.reducers.base import RankingReducer
from subtoken_train.view.view import View


def relevance(unit_BND: Tensor, visual_BN: Tensor, question_BN: Tensor) -> Tensor:
    """Return each visual row's scaled negative mean cosine to the question's rows, [B, N]; 1 where all are alike.

    Args:
        visual_BN: rows that are scored, bool; others are meaningless.
    """
    with torch.autocast(unit_BND.device.type, enabled=False):
        alike_BN = (unit_BND @ masked_mean(unit_BND, question_BN)[..., None])[..., 0]
    low_B1 = alike_BN.masked_fill(~visual_BN, torch.inf).amin(-1, keepdim=True)
    high_B1 = alike_BN.masked_fill(~visual_BN, -torch.inf).amax(-1, keepdim=True)
    range_B1 = high_B1 - low_B1
    return torch.where(range_B1 < SAME, 1.0, (high_B1 - alike_BN + 1e-6) / range_B1)


@dataclass(frozen=True, kw_only=True)
class CDPruner(RankingReducer):
    """CDPruner; its ranking is the order in which tokens are chosen."""

    name: str = "cdpruner"

    ranks: ClassVar[bool] = True
    reads_question: ClassVar[bool] = True

    def scores(self, view: View) -> Tensor:
        """Return how early each token is chosen, negated, [B, N]."""
        unit_BND, visual_BN = unit_rows(view.hidden_BND), view.visual
        weight_BN = relevance(unit_BND, visual_BN, view.question).clamp(min=0)
        return -volume_places(unit_BND, weight_BN, visual_BN, max(self.kept_counts(visual_BN)))
