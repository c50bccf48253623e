"""Token reducers that cut inside the decoder, at one layer or at several; PyramidDrop.

A cut at layer c shortens what layer c and all after it see; it is made from what layer c - 1 was given and gave. Below
the first cut every token stays, with every value group. Ranking reads prompt tokens only, and gradient-free.

Legend: B batch, M rows that are left, D model width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import ClassVar, Self

import torch
from torch import Tensor

from subtoken_train.ledger.kv_budget import exact, kept_count, matched_count
from subtoken_train.reducers.base import PositionPolicy, Reducer, Stage, Tower, keep_ranked
from subtoken_train.view.method import setting
from subtoken_train.view.view import View


@dataclass
class Cut:
    """Decision of a cut.

    Attributes:
        keep_BM: rows that stay, bool; in every sample all but visual ones.
        rank_BM: rank of each visual token that stays, int64, 0 is the sample's best; None: no ranking.
        joins_BM: the row that each row joins, int64, itself or one that stays and is from here on the mean of all that
            join it; None where all stay as they are.
        policy: ``original``: kept rows stay at their own position ids; ``renumber``: they count anew and end where the
            prompt did, as layers below the cut need it. Under mRoPE rows keep their own.
    """

    keep_BM: Tensor
    rank_BM: Tensor | None
    joins_BM: Tensor | None = None
    policy: PositionPolicy = "original"


class DecoderReducer(Reducer, ABC):
    """Cuts between decoder layers. How much stays is known before: ``layer_tokens``."""

    @abstractmethod
    def cuts(self, num_layers: int) -> tuple[int, ...]:
        """Layers before which tokens leave, ascending."""

    def cut_layer(self, num_layers: int) -> int:
        return next(iter(self.cuts(num_layers)), 0)

    @abstractmethod
    def cut(self, view: View) -> Cut:
        """Decide which rows stay."""

    def raters(self, embeds_BND: Tensor, regions_BN: Tensor, prompt_BN: Tensor) -> Tensor | None:
        """Rows whose attention later cuts read, chosen before layer 0 among ``prompt_BN``; None: they need none."""
        return None


class RankedCuts(DecoderReducer):
    """Every cut ranks the visual tokens by a score."""

    @abstractmethod
    def scores(self, view: View) -> Tensor:
        """A score for every row, [B, M]; among visual tokens the highest stay."""

    def cut(self, view: View) -> Cut:
        """The best visual tokens stay; a protected visual row stays, inside the budget."""
        with torch.no_grad():
            scores_BM = self.scores(view)
            kept = (scores_BM, view.regions_BN, view.protected_BN, view.count_B)
            return Cut(*keep_ranked(*kept, self.ranks, self.merges_dropped))


class StagedReducer(RankedCuts):
    """Cuts several times; ``keep_ratio`` is the average share of the visual tokens that all layers hold."""

    stage: ClassVar[Stage] = "decoder"
    staged: ClassVar[bool] = True

    @abstractmethod
    def layer_shares(self, num_layers: int) -> list[Fraction]:
        """Share of the visual tokens that each layer holds, falling; their average is ``keep_ratio``, to 2^-30."""

    def layer_tokens(self, tokens: int, num_layers: int) -> list[int]:
        """Tokens of each layer; with ``matches`` less than a token over the arm: largest remainders are rounded up."""
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
    """PyramidDrop (Xing et al., 2024): the language model in stages; at each stage's end a share of the image leaves.

    Source: "PyramidDrop: Accelerating Your Large Vision-Language Models via Pyramid Visual Redundancy Reduction"
    (2410.17247), section 3. A reconstruction from the paper: stages of equal depth (layers 8, 16 and 24 of 32 are the
    first of a stage); the last layer of a stage ranks the visual tokens by the attention of the last instruction token
    (mean over heads), and the best share of them goes on, at its own positions. ``keep_ratio`` is the average share of
    the visual tokens that all layers hold, and the stages' common share is solved from it: the paper's half is 0.46875
    in four stages (15/32). The first stage holds every token with every group, so an average of a quarter or less is
    out of reach. All images of a sample are ranked together. The paper's share per stage of its own is not offered.

    Attributes:
        stages: into which the decoder layers are divided; tokens leave between them.
    """

    name: str = "pyramiddrop"
    stages: int = setting(4, 2, 10_000)

    ranks: ClassVar[bool] = True

    def cuts(self, num_layers: int) -> tuple[int, ...]:
        if num_layers < self.stages:
            raise ValueError(f"pyramiddrop: stages={self.stages}, but the model has {num_layers} layers")
        return tuple(num_layers * stage // self.stages for stage in range(1, self.stages))

    def layer_shares(self, num_layers: int) -> list[Fraction]:
        cuts, average = self.cuts(num_layers), self.mean_share(num_layers)
        if average * num_layers <= cuts[0]:
            raise ValueError(
                f"pyramiddrop: keep_ratio={self.keep_ratio:g} is the average over layers, and the first {cuts[0]} of "
                f"{num_layers} layers hold every token and make {cuts[0] / num_layers:.2%} alone; raise it, or stages"
            )
        stage_L = [sum(cut <= layer for cut in cuts) for layer in range(num_layers)]
        share = stage_share(tuple(Counter(stage_L).values()), average, self.round_up)
        return [share**stage for stage in stage_L]

    def scores(self, view: View) -> Tensor:
        return view.attention_row(view.layer - 1)


@lru_cache
def stage_share(depths: tuple[int, ...], average: Fraction, round_up: bool) -> Fraction:
    """Share that a stage keeps of the one before, so that all layers hold ``average``; in steps of 2^-30."""

    def held(step: int) -> Fraction:
        return sum((depth * Fraction(step, STEPS) ** i for i, depth in enumerate(depths)), Fraction()) / sum(depths)

    low, high = 0, STEPS  # ``low`` is too little, ``high`` is enough
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if held(middle) >= average else (middle, high)
    return Fraction(high if round_up or held(high) == average else max(1, low), STEPS)
