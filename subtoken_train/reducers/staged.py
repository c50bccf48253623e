"""Token reducers that cut inside the decoder, at one layer or at several.

A cut at layer c shortens what layer c and all after it see; it is made from what layer c - 1 was given and gave. Below
the first cut every token stays, with every value group. Ranking reads prompt tokens only, and gradient-free.

Legend: B batch, M rows that are left, D model width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar, Self

import torch
from torch import Tensor

from subtoken_train.ledger.kv_budget import exact, kept_count, matched_count
from subtoken_train.reducers.base import PositionPolicy, Reducer, Stage, keep_ranked
from subtoken_train.types import TowerStatistics
from subtoken_train.view.view import View


@dataclass
class Cut:
    """Decision of a cut.

    Attributes:
        keep_BM: rows that stay, bool; in every sample all but visual ones.
        rank_BM: rank of each visual token that stays by its score, int64, 0 is the sample's best; None where nothing
            is ranked.
        joins_BM: the row that each row joins, int64, itself or one that stays: that one's state is from here on the
            mean of all that join it; None where all stay as they are.
        policy: ``original``: kept rows stay at their own position ids; ``renumber``: they count anew from here on, so
            that the last one stands where the prompt's did: what is generated goes on after the whole prompt, as layers
            below the cut need it. Under mRoPE rows keep their own either way.
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
        """Return the rows whose attention later cuts read, chosen before layer 0; None where the cuts need none.

        Args:
            prompt_BN: rows of the prompt up to the last token of the turn that holds the last image, bool.
        """
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
        """Share of the visual tokens that each layer holds, falling; their average is ``keep_ratio``.

        Rounded by less than 2^-30, down, or up with ``round_up``.
        """

    def layer_tokens(self, tokens: int, num_layers: int) -> list[int]:
        """Hold all layers together to less than a token over the arm, for an anchor with ``matches``.

        Its counts are rounded down, and those of the stages with the largest remainders up, until they reach the arm's.
        """
        if not self.acts:
            return [tokens] * num_layers
        shares = self.layer_shares(num_layers)
        if self.matches is None:
            return [kept_count(tokens, share, self.round_up) for share in shares]
        arm = replace(self, keep_ratio=self.matches, round_up=False, matches=None).layer_tokens(tokens, num_layers)
        cut = self.cut_layer(num_layers)
        needed = cut * tokens + matched_count(sum(arm[cut:]), self._above_the_cut(num_layers))
        counts = [kept_count(tokens, share) for share in shares]
        missing: dict[int, Fraction] = {}
        for share, count in zip(shares, counts, strict=True):
            missing[count] = max(missing.get(count, Fraction()), share * tokens - count)
        raised: set[int] = set()
        for count in sorted(missing, key=lambda count: (missing[count], count), reverse=True):
            if missing[count] and sum(counts) + sum(each in raised for each in counts) < needed:
                raised.add(count)
        return [count + (count in raised) for count in counts]

    def _above_the_cut(self, num_layers: int) -> Fraction:
        """Return what a token of the matched arm takes where it is routed; below the cut both arms hold all."""
        assert self.matches is not None
        below = Fraction(self.cut_layer(num_layers), num_layers)
        return (exact(self.keep_ratio) - below) / (exact(self.matches) - below)

    def mean_share(self, num_layers: int) -> Fraction:
        return exact(self.keep_ratio)

    def at_share(self, share: Fraction, num_layers: int) -> Self:
        anchor = replace(self, keep_ratio=float(share), round_up=True, matches=self.keep_ratio)
        anchor.layer_shares(num_layers)
        return anchor

    def check_fit(
        self, backbone: str, sees_images: bool, num_layers: int, tower: Collection[TowerStatistics] = ()
    ) -> None:
        super().check_fit(backbone, sees_images, num_layers, tower)
        if self.acts:
            self.layer_shares(num_layers)
