"""Token reducers that cut inside the decoder, at one layer or at several: FastV, PyramidDrop, FitPrune, SparseVLM.

A cut at layer c shortens what layer c and all after it see; it is made from what layer c - 1 was given and gave. Below
the first cut every token stays, with every value group.

Legend: B batch, M rows that are left, D model width, H heads, L layers, R schedules, or raters of a block, V visual and
T text tokens of a sample.
"""

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from subtoken_train.calibrations import CalibratedNumbers, NumberTable, check_table
from subtoken_train.errors import refuse
from subtoken_train.functional.causal_attention import attention_paid
from subtoken_train.functional.gather import plain_product, rank_candidates
from subtoken_train.functional.masks import top_indices
from subtoken_train.ledger.kv_budget import exact, kept_count, matched_count
from subtoken_train.reducers.base import Cut, RankingReducer, Reducer, Stage, Tower, keep_ranked
from subtoken_train.types import Region
from subtoken_train.view.method import by_settings, setting
from subtoken_train.view.view import View


class DecoderReducer(Reducer, ABC):
    """A reducer that cuts between decoder layers; how much stays is known before: ``layer_tokens``."""

    @abstractmethod
    def cuts(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers before which tokens leave, ascending."""

    def cut_layer(self, num_layers: int) -> int:
        return next(iter(self.cuts(num_layers)), 0)

    @abstractmethod
    def cut(self, view: View) -> Cut:
        """Decide which rows stay."""

    def raters(self, embeds_BND: Tensor, regions_BN: Tensor, prompt_BN: Tensor) -> Tensor | None:
        """Choose, before layer 0, the rows of ``prompt_BN`` whose attention later cuts read; None: they need none."""
        return None


class RankedCuts(DecoderReducer):
    """A reducer whose every cut ranks the visual tokens by a score."""

    @abstractmethod
    def scores(self, view: View) -> Tensor:
        """Score every row, [B, M]; of the visual tokens the highest stay."""

    def cut(self, view: View) -> Cut:
        with torch.no_grad():
            kept = (self.scores(view), view.regions_BN, view.protected_BN, view.count_B)
            return keep_ranked(*kept, self.ranks, self.merges_dropped)


def average_too_low(reducer: Reducer, first: int, num_layers: int, advice: str) -> ValueError:
    """Return the error for a keep ratio that the first layers, which hold every token, exceed alone."""
    average = f"{reducer.name}: keep_ratio={reducer.keep_ratio:g} is the average over layers"
    alone = f"the first {first} of {num_layers} layers hold every token and make {first / num_layers:.2%} alone"
    return ValueError(f"{average}, and {alone}; {advice}")


class StagedReducer(RankedCuts):
    """A reducer of several cuts; ``keep_ratio`` is the average share of the visual tokens that all layers hold."""

    stage: ClassVar[Stage] = "decoder"
    staged: ClassVar[bool] = True

    @abstractmethod
    def layer_shares(self, num_layers: int) -> list[Fraction]:
        """Return each layer's share of the visual tokens, falling; their average is ``keep_ratio``, to 2^-30."""

    def layer_tokens(self, tokens: int, num_layers: int) -> list[int]:
        """Count each layer's tokens; with ``matches`` less than one over the arm: largest remainders round up."""
        if not self.acts:
            return [tokens] * num_layers
        shares = self.layer_shares(num_layers)
        if self.matches is None:
            return [kept_count(tokens, share, self.round_up) for share in shares]
        arm = replace(self, keep_ratio=self.matches, round_up=False, matches=None).layer_tokens(tokens, num_layers)
        cut = self.cut_layer(num_layers)
        below = Fraction(cut, num_layers)  # where both arms hold all; above it a token of the arm takes a part
        part = (exact(self.keep_ratio) - below) / (exact(self.matches) - below)
        needed = cut * tokens + matched_count(sum(arm[cut:]), part)
        counts = [kept_count(tokens, share) for share in shares]
        missing: dict[int, Fraction] = {}
        for share, count in zip(shares, counts, strict=True):
            missing[count] = max(missing.get(count, Fraction()), share * tokens - count)
        raised: set[int] = set()
        for count in sorted(missing, key=lambda count: (missing[count], count), reverse=True):
            if missing[count] and sum(counts) + sum(each in raised for each in counts) < needed:
                raised.add(count)
        return [count + (count in raised) for count in counts]

    def mean_share(self, num_layers: int) -> Fraction:
        return exact(self.keep_ratio)

    def at_share(self, share: Fraction, num_layers: int) -> Self:
        anchor = replace(self, keep_ratio=float(share), round_up=True, matches=self.keep_ratio)
        anchor.layer_shares(num_layers)
        return anchor

    def check_fit(self, backbone: str, sees_images: bool, num_layers: int, tower: Tower = ()) -> None:
        super().check_fit(backbone, sees_images, num_layers, tower)
        if self.acts:
            self.layer_shares(num_layers)


STEPS = 2**30
"""In which a stage's share is solved; a half is exact."""


@dataclass(frozen=True, kw_only=True)
class PyramidDrop(StagedReducer):
    """PyramidDrop (Xing et al., 2024): layers in stages; a share of the visual tokens leaves after each stage.

    Source: arXiv 2410.17247, section 3. A reconstruction from the paper: stages of equal depth (layers 8, 16 and 24 of
    32 are the first of a stage); the last layer of a stage ranks the visual tokens by the attention of the last
    instruction token (mean over heads), and the best share of them goes on, at its own positions. ``keep_ratio`` is the
    average share of the visual tokens that all layers hold, and the stages' common share is solved from it: the paper's
    half is 0.46875 in four stages (15/32). An average of a quarter or less is out of reach. The paper's share per stage
    of its own is not offered.

    Attributes:
        stages: into which the decoder layers are divided; tokens leave between them.
    """

    name: str = "pyramiddrop"
    stages: int = setting(4, 2, 10_000)

    ranks: ClassVar[bool] = True

    def cuts(self, num_layers: int) -> tuple[int, ...]:
        refuse((num_layers < self.stages, f"pyramiddrop: stages={self.stages}, but the model has {num_layers} layers"))
        return tuple(num_layers * stage // self.stages for stage in range(1, self.stages))

    def layer_shares(self, num_layers: int) -> list[Fraction]:
        cuts, average = self.cuts(num_layers), self.mean_share(num_layers)
        if average * num_layers <= cuts[0]:
            raise average_too_low(self, cuts[0], num_layers, "raise it, or stages")
        stage_L = [sum(cut <= layer for cut in cuts) for layer in range(num_layers)]
        share = stage_share(tuple(Counter(stage_L).values()), average, self.round_up)
        return [share**stage for stage in stage_L]

    def scores(self, view: View) -> Tensor:
        return view.attention_row(view.layer - 1)


@lru_cache
def stage_share(depths: tuple[int, ...], average: Fraction, round_up: bool) -> Fraction:
    """Return the share that a stage keeps of the one before, so that all layers hold ``average``; in steps of 2^-30."""

    def held(step: int) -> Fraction:
        return sum((depth * Fraction(step, STEPS) ** i for i, depth in enumerate(depths)), Fraction()) / sum(depths)

    enough = bisect_left(range(STEPS), average, lo=1, key=held)
    return Fraction(enough if round_up or held(enough) == average else max(1, enough - 1), STEPS)


Ranking = Literal["adapted", "frozen"]


@dataclass(frozen=True, kw_only=True)
class FastV(RankingReducer, RankedCuts):
    """FastV (Chen et al., 2024): rank visual tokens by the attention they get from the last prompt token at L_f - 1.

    Kept rows stay in order at their original positions. The official code ranks batch element 0 for the whole batch;
    here every sample ranks its own. The mean over heads is ``row_attention``'s in the stage ``embeds``, and
    ``View.attention_row``'s in the stage ``decoder``.

    Attributes:
        stage: where it cuts. ``embeds``: a no-grad scout runs the first layers and ranks, then the shortened input
            starts again at layer 0, so that every layer's cache is short. ``decoder``: the published FastV, rows leave
            at layer ``layer``.
        layer: L_f; the ranking is the head-mean attention of layer L_f - 1, counted from 0.
        ranking: by which weights the scout ranks. ``adapted``: with the LoRA that is being trained, so that every
            adapter drifts to tokens of its own; ``frozen``: by the backbone alone. Stage ``embeds`` only.
        merge_dropped: of the n tokens that a sample keeps, the best n - 1 stay as they are and the n-th becomes the
            mean of itself and of all that are dropped: of their input embeddings, or in the stage ``decoder`` of the
            states that layer ``layer`` would have seen. It stays at its own position and ranks last.
    """

    name: str = "fastv"
    stage: Literal["embeds", "decoder"] = "embeds"
    layer: int = setting(2, 1, 10_000)
    ranking: Ranking = "adapted"
    merge_dropped: bool = False

    ranks: ClassVar[bool] = True
    scout_layers = by_settings(lambda self: self.layer)
    frozen_scout = by_settings(lambda self: self.ranking == "frozen")
    merges_dropped = by_settings(lambda self: self.merge_dropped)

    def __post_init__(self) -> None:
        super().__post_init__()
        unscouted = f"reducer.ranking 'frozen' ranks by a scout, and FastV's stage {self.stage!r} has none"
        instead = "set reducer.stage: embeds, or reducer.ranking: adapted"
        refuse((self.frozen_scout and self.stage != "embeds", f"{unscouted}; {instead}"))

    def cuts(self, num_layers: int) -> tuple[int, ...]:
        return (self.layer,) if self.stage == "decoder" else ()

    @property
    def words(self) -> str:
        frozen = "frozen ranking" if self.frozen_scout else ""
        merged = "one token of them the mean of what is dropped" if self.merge_dropped else ""
        return ", ".join(filter(None, [f"stage {self.stage}, L_f={self.layer}", frozen, merged]))

    def scores(self, view: View) -> Tensor:
        return view.attention_row(self.layer - 1)


PUBLISHED_TOKENS = 576
PUBLISHED = (
    (0, 0, 1, 2, 1, 0, 1, 4, 5, 5, 11, 4, 2, 2, 0, 0, 1, 1, 2, 4, 2, 10, 1, 1, 1, 2, 1, 1, 0, 1, 0, 0),
    (0, 0, 3, 3, 1, 1, 4, 16, 14, 15, 24, 4, 2, 3, 2, 0, 6, 0, 5, 13, 4, 19, 2, 1, 1, 1, 1, 1, 2, 1, 0, 0),
    (0, 0, 7, 6, 4, 5, 16, 40, 24, 21, 24, 4, 2, 3, 4, 0, 16, 0, 11, 26, 6, 32, 3, 1, 0, 1, 2, 2, 4, 0, 0, 0),
    (0, 1, 21, 13, 14, 11, 41, 53, 29, 15, 14, 5, 1, 4, 5, 1, 26, 1, 13, 28, 6, 27, 2, 1, 0, 0, 1, 1, 2, 0, 0, 0),
    (3, 7, 49, 24, 29, 17, 59, 41, 26, 8, 10, 6, 2, 5, 7, 2, 30, 3, 13, 27, 5, 23, 2, 1, 0, 0, 1, 1, 2, 0, 0, 0),
    (6, 17, 69, 31, 34, 19, 59, 30, 23, 6, 8, 7, 2, 5, 8, 2, 29, 4, 12, 25, 4, 19, 2, 1, 0, 0, 1, 0, 1, 0, 0, 0),
    (14, 33, 89, 36, 36, 20, 55, 21, 18, 4, 7, 5, 2, 5, 7, 4, 26, 5, 11, 24, 4, 18, 2, 1, 0, 0, 1, 0, 1, 0, 0, 0),
    (48, 79, 118, 41, 33, 17, 36, 9, 9, 2, 3, 2, 1, 3, 4, 8, 18, 7, 8, 20, 4, 13, 2, 1, 0, 0, 1, 0, 1, 0, 0, 0),
    (128, 127, 118, 35, 26, 8, 13, 3, 2, 1, 0, 0, 0, 2, 1, 8, 7, 8, 5, 11, 2, 6, 1, 1, 0, 0, 0, 1, 0, 0, 0, 0),
    (262, 153, 80, 19, 13, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 2, 1, 2, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0),
)
"""Tokens, of 576, that leave after each of LLaVA-1.5-7B's layers: the release's 10 to 90 % of FLOPs, with 55."""


@dataclass(frozen=True)
class PruneSchedules(NumberTable):
    """Shares of the visual tokens that layers hold, [R, L]: 1 in layer 0, falling; rows by falling average."""

    table: ClassVar[str] = "shares"
    says: ClassVar[str] = "share of the visual tokens in every layer, a line per schedule"
    by_layer: ClassVar[bool] = True

    shares: list[list[float]]

    def __post_init__(self) -> None:
        check_table("shares", self.shares, 0, 1)
        for i, row in enumerate(self.shares):
            if row[0] != 1 or any(low > high for high, low in pairwise(row)):
                raise ValueError(f"shares[{i}] must start at 1 and never rise: layers after a cut hold no more")
            refuse((row[-1] <= 0, f"shares[{i}] ends at {row[-1]:g}; the last layer holds something"))
        if any(low >= high for high, low in pairwise([1.0, *[sum(row) / len(row) for row in self.shares]])):
            raise ValueError("shares must be rows of falling averages below 1")


@dataclass(frozen=True, kw_only=True)
class FitPrune(StagedReducer):
    """FitPrune (Ye et al., 2024): each layer drops as many visual tokens as calibration found harmless.

    Source: arXiv 2409.10197 and its release (ywh187/FitPrune, d28e418). A visual token's score is what all visual rows
    pay to it times what the text rows after the image pay to it, each the largest of its heads; the lowest leave after
    the layer's attention, so that the layer's own cache holds them. How many leave is found once for a backbone
    (``subtoken-train calibrate fitprune``); without a ``calibration`` the release's tables for LLaVA-1.5-7B are read,
    and no other model takes them. ``keep_ratio`` is the average share of the visual tokens that all layers hold;
    between two tabulated schedules layers lie on straight lines. Routers act from layer 1 on.

    Attributes:
        calibration: file of the backbone's schedules; None: those that are published for LLaVA-1.5-7B.
    """

    name: str = "fitprune"
    calibration: str | None = None

    calibrates: ClassVar[type[CalibratedNumbers]] = PruneSchedules
    ranks: ClassVar[bool] = True

    @cached_property
    def _schedules(self) -> list[list[Fraction]]:
        """Shares of all schedules, that of everything first, as exact numbers."""
        if self.calibrated is not None:
            rows = [[exact(share) for share in row] for row in self.calibrated.numbers.shares]
        else:
            left = [accumulate(row[:-1], lambda held, gone: held - gone, initial=PUBLISHED_TOKENS) for row in PUBLISHED]
            rows = [[Fraction(count, PUBLISHED_TOKENS) for count in row] for row in left]
        return [[Fraction(1)] * len(rows[0]), *rows]

    def cuts(self, num_layers: int) -> tuple[int, ...]:
        return tuple(range(1, num_layers))

    def layer_shares(self, num_layers: int) -> list[Fraction]:
        average = self.mean_share(num_layers)
        for high, low in pairwise(self._schedules):
            above, below = sum(high, Fraction()) / len(high), sum(low, Fraction()) / len(low)
            if below <= average:
                part = (above - average) / (above - below)
                return [more + part * (less - more) for more, less in zip(high, low, strict=True)]
        raise ValueError(
            f"fitprune: keep_ratio={self.keep_ratio:g} is the average over layers, and the lowest schedule of "
            f"{self.calibration or 'the published table'} has {float(below):.6g}; raise it, or calibrate a lower one"
        )

    def check_fit(self, backbone: str, sees_images: bool, num_layers: int, tower: Tower = ()) -> None:
        layers = len(self._schedules[0])
        if sees_images and (num_layers != layers or (self.calibration is None and backbone != "llava")):
            whose = f"{self.calibration} is" if self.calibration else "the published table is LLaVA-1.5-7B's,"
            own = "make its own: subtoken-train calibrate fitprune, and name the file in reducer.calibration"
            raise ValueError(f"fitprune: {whose} of {layers} layers, and this is {backbone} of {num_layers}; {own}")
        super().check_fit(backbone, sees_images, num_layers, tower)

    def scores(self, view: View) -> Tensor:
        self_BM, cross_BM, asks_B = attention_masses(view)
        return self_BM * cross_BM.where(asks_B[:, None], 1.0)


def attention_masses(view: View) -> tuple[Tensor, Tensor, Tensor]:
    """Average what visual rows, and text after them, pay each row, [B, M] (largest head); last: who has such text."""
    visual_BM = view.visual
    after_BM = view.prompt & ~visual_BM & (visual_BM.cumsum(-1) > 0)
    rows = visual_BM, after_BM
    masses = [attention_paid(view.blocks(each), "max") / each.sum(-1, keepdim=True).clamp(min=1) for each in rows]
    return masses[0], masses[1], after_BM.any(-1)


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
    mean_T = plain_product(visual_VD.float(), text_TD.float().T).softmax(-1).mean(0)
    raters_T = mean_T > mean_T.mean()
    return raters_T if bool(raters_T.any()) else torch.ones_like(raters_T)


def recycled_counts(dropped: int) -> tuple[int, int]:
    """Return how many of the tokens that leave are recycled, and into how many clusters; none of none."""
    recycled = int(dropped * 0.3) + 1 if dropped else 0
    return recycled, recycled // 10 + 1 if dropped else 0


def kept_of(tokens: int, left: int) -> int:
    """Return how many tokens stay unmerged if ``left`` of ``tokens`` go on, recycled ones included; at least one."""
    return next((kept for kept in range(left, 0, -1) if kept + recycled_counts(tokens - kept)[1] <= left), left)


@dataclass(frozen=True, kw_only=True)
class SparseVLM(StagedReducer):
    """SparseVLM (Zhang et al., 2024, arXiv:2410.04417) and SparseVLM+ (``version`` 2): text rates, three layers cut.

    As released (Gumpest/SparseVLMs @26a5f48). Raters are the text tokens after an image whose mean, over visual tokens,
    of softmax over text (V T^T of the input embeddings) exceeds the text's mean. The attention of layers 2, 6 and 15
    (of 32, scaled to another depth) ranks the visual tokens that are still there: mean over heads and raters. Version 1
    keeps the best and recycles: of those that leave, the best 30 % (and one) are clustered by DPC-KNN into a tenth as
    many clusters (and one), each of which goes on as its mean; positions count anew. Version 2 recycles nothing, keeps
    positions, divides attention by what the rotary embedding alone prefers (the product of two vectors of ones), and
    reads the ``heads`` heads that attend most to the image.

    ``keep_ratio`` is the average share of the visual tokens that all layers hold, recycled ones among them. The stages'
    shares lie on straight lines between the release's ``LISTS``; the layers below the first cut hold everything, so
    that 9.4 % or less is out of reach (of 32 layers). A sample ranks its own tokens, all images together; a recycled
    token takes the place of its cluster's centre; no noise on densities; without a rater all text rates, without text
    the last prompt token. Adaptive counts by matrix rank are not offered.

    Attributes:
        version: 1 recycles and counts positions anew; 2 keeps positions and corrects what it ranks by.
        heads: which attend most to the image, and rank it, in version 2; all where a layer has fewer.
    """

    name: str = "sparsevlm"
    version: Version = 1
    heads: int = setting(14, 1, 10_000)

    ranks: ClassVar[bool] = True

    def cuts(self, num_layers: int) -> tuple[int, ...]:
        scaled = ((2 * cut * num_layers + DEPTH) // (2 * DEPTH) for cut in CUTS)
        found = accumulate(scaled, lambda before, cut: max(cut, before + 1), initial=0)
        return tuple(cut for cut in found if 0 < cut < num_layers)

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
        chosen_Bk = top_indices((scores_BHM * view.visual[:, None]).sum(-1), self.heads)
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
        """Mark the tokens that go on, centres of clusters among them; each row's goal, [M]: its centre, or itself."""
        visual_M, scores_M = view.visual[sample], scores_BM[sample]
        read_M, rows_M = visual_M & view.protected_BN[sample], torch.arange(len(visual_M), device=visual_M.device)
        tokens, read = int(visual_M.sum()), int(read_M.sum())
        left = min(tokens, max(int(view.count_B[sample]), read))
        kept = max(read, kept_of(tokens, left)) if left < tokens else tokens
        kept_M = visual_M & (rank_candidates(scores_M.masked_fill(read_M, torch.inf)[None], visual_M[None])[0] < kept)
        if kept == left:
            return kept_M, rows_M
        order = top_indices(scores_M.masked_fill(~visual_M | kept_M, -torch.inf), tokens - int(kept_M.sum()))
        recycled, hidden_MD = order[: recycled_counts(len(order))[0]], view.hidden_BND[sample]
        apart = distances(hidden_MD[recycled.to(hidden_MD.device)]).to(recycled.device)
        centres, cluster = density_clusters(apart, densities(apart, left - kept), left - kept)
        goals = recycled[centres]
        return kept_M.index_fill(0, goals, True), rows_M.scatter(0, recycled, goals[cluster])
