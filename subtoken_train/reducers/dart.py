"""DART (Wen et al., 2025, arXiv:2502.11494): keep a few pivots and the visual tokens that repeat them least.

As released (ZichenWen1/DART, read in the copy xqy1111111/DART @d6a5af6): the four visual tokens and the four tokens of
the text whose keys have the largest L1 norm are pivots; one after another, each takes an equal number of the visual
tokens that are left, those least like it by cosine. What stays keeps its position. No attention is read.

Stage ``decoder`` is the published method: rows leave at layer ``layer``, by the keys of the layer below and its output
after the model's last norm. Stage ``embeds`` is a reconstruction by the input embeddings: rows leave before layer 0, so
that every layer's cache is short, as arms of equal bytes need.

What differs: the count is exact (there 4 and as many times 8 as the share holds), and remainders go to the first
pivots; pivots take in the order of their norms, image before text; the text is the question up to the token that asks;
a sample's images are pruned together. The last token of a prompt that ends with its image stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from subtoken_train.functional.diversity import unit_rows, unlike_places
from subtoken_train.functional.gather import rank_candidates
from subtoken_train.reducers.base import RankingReducer
from subtoken_train.reducers.staged import RankedCuts
from subtoken_train.view.method import setting
from subtoken_train.view.view import View

DARTStage = Literal["embeds", "decoder"]
PIVOTS = 4
"""Pivots of the image, and of the text."""
_LAYER = 2


def dart_places(states_BND: Tensor, norm_BN: Tensor, visual_BN: Tensor, question_BN: Tensor, count_B: Tensor) -> Tensor:
    """Return the place in which each visual token is taken, int64 [B, N]; N where it is not.

    Args:
        norm_BN: what pivots are chosen by.
        question_BN: rows of the text that may be pivots, bool.
    """
    rank_BN, text_rank_BN = rank_candidates(norm_BN, visual_BN), rank_candidates(norm_BN, question_BN)
    pivots_BP = torch.cat([ranks.argsort(-1)[:, :PIVOTS] for ranks in (rank_BN, text_rank_BN)], 1)
    limits_B2 = torch.stack([count_B.clamp(max=PIVOTS), question_BN.sum(-1).clamp(max=PIVOTS)], 1)
    number_p = torch.arange(pivots_BP.shape[1] // 2, device=count_B.device)  # of either kind
    there_BP = (number_p < limits_B2[..., None]).flatten(1)
    left_B1, pivots_B1 = (count_B - limits_B2[:, 0])[:, None], there_BP.sum(-1, keepdim=True).clamp(min=1)
    quota_BP = left_B1 // pivots_B1 + (there_BP.cumsum(-1) <= left_B1 % pivots_B1)
    pivot_BN = visual_BN & (rank_BN < limits_B2[:, :1])
    open_BN = visual_BN & ~pivot_BN
    places_BN = unlike_places(
        unit_rows(states_BND), pivots_BP, open_BN, quota_BP * there_BP, limits_B2[:, :1], visual_BN.shape[1]
    )
    return torch.where(pivot_BN, rank_BN, places_BN)


@dataclass(frozen=True, kw_only=True)
class DART(RankingReducer, RankedCuts):
    """DART.

    Attributes:
        stage: where it cuts. ``embeds``: before layer 0, by the input embeddings; ``decoder``: as published.
        layer: at which rows leave, in the stage ``decoder``.
    """

    name: str = "dart"
    stage: DARTStage = "embeds"
    layer: int = setting(_LAYER, 1, 10_000)

    reads_question: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stage == "embeds" and self.layer != _LAYER:
            raise ValueError(
                f"reducer.layer {self.layer} is for DART's stage decoder, and stage {self.stage!r} reads no layer; set "
                "reducer.stage: decoder, or leave layer out"
            )

    def cuts(self, num_layers: int) -> tuple[int, ...]:
        return (self.layer,) if self.stage == "decoder" else ()

    @property
    def words(self) -> str:
        return f"stage {self.stage}, layer {self.layer}" if self.stage == "decoder" else f"stage {self.stage}"

    def scores(self, view: View) -> Tensor:
        """Return how early each token is taken, by the input embeddings or the layer below, negated, [B, N]."""
        if self.stage == "decoder":
            norm_BN = view.key_BhNd.float().abs().sum((1, 3)).to(view.regions_BN.device)
            return -dart_places(view.normed_states(), norm_BN, view.visual, view.question, view.count_B)
        norm_BN = view.hidden_BND.float().abs().sum(-1)
        count_B = torch.tensor(self.kept_counts(view.visual), device=norm_BN.device)
        return -dart_places(view.hidden_BND, norm_BN, view.visual, view.question, count_B)
