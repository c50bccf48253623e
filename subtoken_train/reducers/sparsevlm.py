"""SparseVLM (Zhang et al., 2024, arXiv:2410.04417) and SparseVLM+ (``version`` 2): text rates, three layers cut.

As released (Gumpest/SparseVLMs @26a5f48). Raters are the text tokens after an image whose mean, over visual tokens, of
softmax over text (V T^T of the input embeddings) exceeds the text's mean. The attention of layers 2, 6 and 15 (of 32,
scaled to another depth) ranks the visual tokens that are still there: mean over heads and raters. Version 1 keeps the
best and recycles: of those that leave, the best 30 % (and one) are clustered by DPC-KNN into a tenth as many clusters
(and one), each of which goes on as its mean; positions count anew. Version 2 recycles nothing, keeps positions, divides
attention by what the rotary embedding alone prefers (the product of two vectors of ones), and reads the ``heads`` heads
that attend most to the image.

``keep_ratio`` is the average share of the visual tokens that all layers hold, recycled ones among them. The stages'
shares lie on straight lines between the release's ``LISTS``; the layers below the first cut hold everything, so that
9.4 % or less is out of reach (of 32 layers). A sample ranks its own tokens, all images together; a recycled token takes
the place of its cluster's centre; no noise on densities; without a rater all text rates, without text the last prompt
token. Adaptive counts by matrix rank are not offered.

Legend: B batch, M rows, H heads, R raters of a block, D model width, V visual and T text tokens of a sample.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import ClassVar, Literal

import torch
from torch import Tensor

from subtoken_train.functional.gather import rank_candidates
from subtoken_train.functional.masks import top_indices
from subtoken_train.reducers.base import Cut
from subtoken_train.reducers.staged import StagedReducer, average_too_low
from subtoken_train.types import Region
from subtoken_train.view.method import setting
from subtoken_train.view.view import View


def distances(points_NC: Tensor) -> Tensor:
    """Return the Euclidean distances over the root of the width, [N, N] in fp32."""
    points_NC = points_NC.float()
    with torch.autocast(points_NC.device.type, enabled=False):
        between_NN = torch.cdist(points_NC, points_NC, compute_mode="donot_use_mm_for_euclid_dist")
    return between_NN / math.sqrt(points_NC.shape[1])


def densities(distance_NN: Tensor, nearest: int) -> Tensor:
    """Return exp(-mean of the squared distances to the ``nearest`` points, the point itself among them), [N]."""
    return (-distance_NN.topk(nearest, largest=False).values.square().mean(-1)).exp()


def density_clusters(distance_NN: Tensor, density_N: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return centres [k], best peak first, and every point's cluster [N], 0 to k - 1; ties go to the earlier one.

    A point's peak score is its density times the distance to the nearest denser point (the largest distance of all
    where there is none). Of equally dense points, the earlier one is the denser.
    """
    earlier_NN = torch.ones_like(distance_NN, dtype=torch.bool).tril(-1)
    denser_NN = (density_N > density_N[:, None]) | ((density_N == density_N[:, None]) & earlier_NN)
    apart_N = torch.where(denser_NN, distance_NN, distance_NN.max()).amin(-1)
    centres_k = (apart_N * density_N).sort(descending=True, stable=True).indices[:count]
    cluster_N = distance_NN[centres_k].argmin(0)
    cluster_N[centres_k] = torch.arange(count, device=cluster_N.device)
    return centres_k, cluster_N


Version = Literal[1, 2]
CUTS, DEPTH, TOKENS = (3, 7, 16), 32, 576
"""Layers that see less than the one before, of how many; and what the lists are about."""
LISTS: dict[int, tuple[tuple[int, int, int], ...]] = {
    1: ((309, 204, 113), (312, 117, 39), (249, 55, 27), (82, 32, 18)),
    2: ((300, 200, 118), (238, 108, 60), (246, 54, 28), (66, 34, 20)),
}
"""Tokens after each cut for 192, 128, 96 and 64 tokens; in version 1 with the recycled ones."""


def text_raters(visual_VD: Tensor, text_TD: Tensor) -> Tensor:
    """Mark the text tokens that rate, bool [T]: those nearest to the image by input embeddings; at least one."""
    with torch.autocast(text_TD.device.type, enabled=False):
        mean_T = (visual_VD.float() @ text_TD.float().T).softmax(-1).mean(0)
    raters_T = mean_T > mean_T.mean()
    return raters_T if bool(raters_T.any()) else torch.ones_like(raters_T)


def recycled_counts(dropped: int) -> tuple[int, int]:
    """Return how many of the tokens that leave are recycled, and into how many clusters; none of none."""
    recycled = int(dropped * 0.3) + 1 if dropped else 0
    return recycled, recycled // 10 + 1 if dropped else 0


def kept_of(tokens: int, left: int) -> int:
    """Return how many tokens stay unmerged if ``left`` of ``tokens`` go on, recycled ones included; at least one."""
    return next((kept for kept in range(left, 0, -1) if kept + recycled_counts(tokens - kept)[1] <= left), left)


def recycled_rows(hidden_MD: Tensor, scores_M: Tensor, dropped_M: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """Return the recycled tokens' centres [clusters], and each row's goal, int64 [M]: its centre, or itself."""
    rows_M = torch.arange(len(dropped_M), device=dropped_M.device)
    order = top_indices(scores_M.masked_fill(~dropped_M, -torch.inf), int(dropped_M.sum()))
    recycled = order[: recycled_counts(len(order))[0]]
    apart = distances(hidden_MD[recycled.to(hidden_MD.device)]).to(recycled.device)
    centres, cluster = density_clusters(apart, densities(apart, clusters), clusters)
    return recycled[centres], rows_M.scatter(0, recycled, recycled[centres][cluster])


@dataclass(frozen=True, kw_only=True)
class SparseVLM(StagedReducer):
    """SparseVLM or SparseVLM+, as the module describes them.

    Attributes:
        version: 1 recycles and counts positions anew; 2 keeps positions and corrects what it ranks by.
        heads: which attend most to the image, and rank it, in version 2; all where a layer has fewer.
    """

    name: str = "sparsevlm"
    version: Version = 1
    heads: int = setting(14, 1, 10_000)

    ranks: ClassVar[bool] = True

    def cuts(self, num_layers: int) -> tuple[int, ...]:
        found: list[int] = []
        for cut in CUTS:
            found.append(max((2 * cut * num_layers + DEPTH) // (2 * DEPTH), (found or [0])[-1] + 1))
        return tuple(cut for cut in found if cut < num_layers)

    def layer_shares(self, num_layers: int) -> list[Fraction]:
        cuts, average = self.cuts(num_layers), self.mean_share(num_layers)
        stage_L = [sum(cut <= layer for cut in cuts) for layer in range(num_layers)]
        lists = [[Fraction(1), *(Fraction(kept, TOKENS) for kept in kept_3)] for kept_3 in LISTS[self.version]]
        knots = [[share_4[stage] for stage in stage_L] for share_4 in ([Fraction(1)] * 4, *lists)]
        knots.append([Fraction(stage == 0) for stage in stage_L])
        for more, less in pairwise(knots):
            high, low = sum(more) / Fraction(num_layers), sum(less) / Fraction(num_layers)
            if low < average <= high:
                part = (average - low) / (high - low)
                return [part * x + (1 - part) * y for x, y in zip(more, less, strict=True)]
        raise average_too_low(self, cuts[0], num_layers, "raise it")

    def raters(self, embeds_BND: Tensor, regions_BN: Tensor, prompt_BN: Tensor) -> Tensor:
        raters_BN = torch.zeros_like(prompt_BN)
        for embeds_ND, regions_N, prompt_N, raters_N in zip(embeds_BND, regions_BN, prompt_BN, raters_BN, strict=True):
            text = ((regions_N == Region.QUERY) & prompt_N).nonzero()[:, 0]
            if len(text):
                raters_N[text] = text_raters(embeds_ND[regions_N == Region.VISUAL], embeds_ND[text])
            elif bool(prompt_N.any()):
                raters_N[prompt_N.nonzero()[-1]] = True
        return raters_BN

    def scores(self, view: View) -> Tensor:
        total_BHM: Tensor | None = None
        asked = zip(view.blocks(view.raters_BN), view.rotary_pull(view.raters_BN), strict=True)
        for (index_BR, attention_BHRM), pull_BRM in asked:
            corrected = attention_BHRM if self.version == 1 else attention_BHRM / pull_BRM[:, None]
            summed_BHM = (corrected * (index_BR >= 0)[:, None, :, None]).sum(2)
            total_BHM = summed_BHM if total_BHM is None else total_BHM + summed_BHM
        assert total_BHM is not None
        scores_BHM = total_BHM / view.raters_BN.sum(-1).clamp(min=1)[:, None, None]
        if self.version == 1 or self.heads >= scores_BHM.shape[1]:
            return scores_BHM.mean(1)
        seeing_BH = (scores_BHM * view.visual[:, None]).sum(-1)
        chosen_Bk = top_indices(seeing_BH, self.heads)
        return scores_BHM.gather(1, chosen_Bk[..., None].expand(-1, -1, scores_BHM.shape[2])).mean(1)

    def cut(self, view: View) -> Cut:
        """Keep the best; in version 1 some of the others join at their clusters' centres."""
        if self.version == 2:
            return super().cut(view)
        with torch.no_grad():
            scores_BM = self.scores(view)
            made = [self._recycled(view, scores_BM, sample) for sample in range(len(scores_BM))]
            stays_BM, joins_BM = (torch.stack(parts) for parts in zip(*made, strict=True))
            keep_BM = stays_BM | (~view.visual & (view.regions_BN != Region.PADDING))
            return Cut(keep_BM, rank_candidates(scores_BM, stays_BM), joins_BM, "renumber")

    def _recycled(self, view: View, scores_BM: Tensor, sample: int) -> tuple[Tensor, Tensor]:
        visual_M, scores_M = view.visual[sample], scores_BM[sample]
        read_M, rows_M = visual_M & view.protected_BN[sample], torch.arange(len(visual_M), device=visual_M.device)
        tokens, read = int(visual_M.sum()), int(read_M.sum())
        left = min(tokens, max(int(view.count_B[sample]), read))
        kept = max(read, kept_of(tokens, left)) if left < tokens else tokens
        rank_M = rank_candidates(scores_M.masked_fill(read_M, torch.inf)[None], visual_M[None])[0]
        kept_M = visual_M & (rank_M < kept)
        if kept == left:
            return kept_M, rows_M
        centres, joins_M = recycled_rows(view.hidden_BND[sample], scores_M, visual_M & ~kept_M, left - kept)
        return kept_M.index_fill(0, centres, True), joins_M
