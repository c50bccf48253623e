"""Reducers that keep visual tokens unlike each other: DivPrune, CDPruner, DART.

Legend: B batch, N positions, D model width, P pivots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from subtoken_train.functional.diversity import SAME, farthest_places, unit_rows, unlike_places, volume_places
from subtoken_train.functional.gather import masked_mean, rank_candidates
from subtoken_train.reducers.base import RankingReducer
from subtoken_train.reducers.staged import RankedCuts
from subtoken_train.view.method import setting
from subtoken_train.view.view import View


@dataclass(frozen=True, kw_only=True)
class DivPrune(RankingReducer):
    """DivPrune (Alvar et al., 2025, arXiv:2503.02175): keep the visual tokens that are farthest from each other.

    As released (vbdi/divprune @799e2d9): among the projected visual features, distance being 1 - cosine, the first is
    the one whose nearest other is farthest away; then, again and again, the one whose nearest chosen one is (greedy
    max-min). That order is the ranking. Neither attention nor the question is read: it serves every family that sees
    images. Kept tokens keep their positions, distances are in fp32, all images of a sample are pruned together;
    newlines are all alike, so that one stays at most while any other token is left. The last token of a prompt that
    ends with its image stays, in place of the last one that is chosen.
    """

    name: str = "divprune"

    ranks: ClassVar[bool] = True

    def scores(self, view: View) -> Tensor:
        visual_BN = view.visual
        steps = max(self.kept_counts(visual_BN))
        return -farthest_places(unit_rows(view.hidden_BND), visual_BN, steps)


def relevance(unit_BND: Tensor, visual_BN: Tensor, question_BN: Tensor) -> Tensor:
    """Each visual row's scaled negative mean cosine to the question's rows, [B, N]; 1 where all are alike."""
    with torch.autocast(unit_BND.device.type, enabled=False):
        alike_BN = (unit_BND @ masked_mean(unit_BND, question_BN)[..., None])[..., 0]
    low_B1 = alike_BN.masked_fill(~visual_BN, torch.inf).amin(-1, keepdim=True)
    high_B1 = alike_BN.masked_fill(~visual_BN, -torch.inf).amax(-1, keepdim=True)
    range_B1 = high_B1 - low_B1
    return torch.where(range_B1 < SAME, 1.0, (high_B1 - alike_BN + 1e-6) / range_B1)


@dataclass(frozen=True, kw_only=True)
class CDPruner(RankingReducer):
    """CDPruner (Zhang et al., 2025, arXiv:2506.10967): keep diverse visual tokens, given what the instruction asks.

    As released (Theia-4869/CDPruner @9541616): a determinantal point process over the visual tokens has the kernel r_i
    cos_ij r_j of their projected features; its greedy MAP set stays, in whose order tokens rank. The relevance r is the
    *negative* mean cosine to the text's embeddings, min-max scaled to [0, 1] with 1e-6 added to the numerator.

    A reconstruction in one point: the release takes r from CLIP's own text tower, which no LLaVA checkpoint holds.
    Here, in every family, it is of the projected features and the question's input embeddings, as in OpenVINO's port
    (openvino_contrib @98c5fe8). Without a question r = 1. Relevance is scaled per sample, all images of a sample are
    pruned together, kept tokens keep their positions; once the chosen tokens span all others the lowest index is next.
    The last token of a prompt that ends with its image stays.
    """

    name: str = "cdpruner"

    ranks: ClassVar[bool] = True
    reads_question: ClassVar[bool] = True

    def scores(self, view: View) -> Tensor:
        unit_BND, visual_BN = unit_rows(view.hidden_BND), view.visual
        weight_BN = relevance(unit_BND, visual_BN, view.question).clamp(min=0)
        return -volume_places(unit_BND, weight_BN, visual_BN, max(self.kept_counts(visual_BN)))


DARTStage = Literal["embeds", "decoder"]
PIVOTS = 4
"""Pivots of the image, and of the text."""
_LAYER = 2


def dart_places(states_BND: Tensor, norm_BN: Tensor, visual_BN: Tensor, question_BN: Tensor, count_B: Tensor) -> Tensor:
    """The place in which each visual token is taken, int64 [B, N]; N where it is not; pivots by ``norm_BN``."""
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
    """DART (Wen et al., 2025, arXiv:2502.11494): keep a few pivots and the visual tokens that repeat them least.

    As released (ZichenWen1/DART, read in the copy xqy1111111/DART @d6a5af6): the four visual tokens and the four tokens
    of the text whose keys have the largest L1 norm are pivots; one after another, each takes an equal number of the
    visual tokens that are left, those least like it by cosine. What stays keeps its position. No attention is read. The
    count is exact (there 4 and as many times 8 as the share holds), and remainders go to the first pivots; pivots take
    in the order of their norms, image before text; the text is the question up to the token that asks; a sample's
    images are pruned together. The last token of a prompt that ends with its image stays.

    Attributes:
        stage: where it cuts. ``decoder``, as published: rows leave at layer ``layer``, by the keys of the layer below
            and its output after the model's last norm. ``embeds``, a reconstruction: before layer 0, by the input
            embeddings, so that every layer's cache is short, as arms of equal bytes need.
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
        if self.stage == "decoder":
            norm_BN = view.key_BhNd.float().abs().sum((1, 3)).to(view.regions_BN.device)
            return -dart_places(view.normed_states(), norm_BN, view.visual, view.question, view.count_B)
        norm_BN = view.hidden_BND.float().abs().sum(-1)
        count_B = torch.tensor(self.kept_counts(view.visual), device=norm_BN.device)
        return -dart_places(view.hidden_BND, norm_BN, view.visual, view.question, count_B)
