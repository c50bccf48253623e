"""CDPruner (Zhang et al., 2025, arXiv:2506.10967): keep diverse visual tokens, given what the instruction asks.

As released (Theia-4869/CDPruner @9541616, ``llava/model/llava_arch.py``): a determinantal point process over the visual
tokens has the kernel r_i cos_ij r_j of their projected features; its greedy MAP set stays, by incremental Cholesky. The
relevance r is the *negative* mean cosine to the text's embeddings, min-max scaled to [0, 1] with 1e-6 added to the
numerator, so that the least relevant one counts too; the exponent theta of the paper is off, as it is there.

A reconstruction in one point: the release takes r from CLIP's own text tower, which no LLaVA checkpoint holds. Here, in
every family, it is of the projected features and the input embeddings of the question, as in OpenVINO's port for other
families (openvino_contrib @98c5fe8, ``visual_token_pruning.py``), which keeps the sign; whether it is the right one
between a language model's embeddings, neither shows. A prompt without a question has r = 1: diversity alone.

What differs besides: relevance is scaled per sample (there over a batch), and all images of a sample are pruned
together (there each tile has a count of its own); kept tokens stay at their own positions; the Cholesky factor is that
of the cosines, and once the chosen tokens span all others the lowest index is next (the release divides by zero). No
attention is read. The last token of a prompt that ends with its image stays, in place of the last one that is chosen.
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
