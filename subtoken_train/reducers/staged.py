"""Token reducers that cut inside the decoder, at one layer or at several.

A cut at layer c shortens what layer c and all after it see; it is made from what layer c - 1 was given and gave. Below
the first cut every token stays, with every value group. Ranking reads prompt tokens only, and gradient-free.

Legend: B batch, M rows that a cut may leave out, H query heads, R rows of a block, D model width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import reduce
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from subtoken_train.ledger.kv_budget import exact, kept_count, matched_count
from subtoken_train.reducers.base import PositionPolicy, Reducer, Stage, keep_ranked
from subtoken_train.types import Region, TowerStatistics

AttentionBlocks = Callable[[Tensor], Iterator[tuple[Tensor, Tensor]]]
"""Called with marks of rows, bool [B, M]: yields their attention a block of rows at a time, softmax over what they see,
[B, H, R, M] in fp32, and which of the R rows count, bool [B, R]. No block is kept."""


@dataclass
class CutView:
    """Input of a cut: the rows that are still there.

    Attributes:
        layer: the first one that will see what stays.
        regions_BM: ``Region`` codes.
        protected_BM: rows that predict a token that is learnt or asked for, bool; they stay, whatever they score.
        ranking_BM: the last prompt token of the turn that holds the last image, or of what is left up to it, bool; none
            in a sample without an image.
        prompt_BM: rows up to it, bool.
        raters_BM: what ``DecoderReducer.raters`` marked, bool; None where it marks nothing.
        count_B: visual tokens that stay of each sample, int64.
        sample_seed_B: a number per sample, int64.
        hidden_BMD: output of the layer below the cut.
        attention: of that layer.
        rotary_pull: for the same blocks, [B, R, M] in fp32: the scaled product of a query and a key of ones after the
            rotary embedding, what it alone makes of two places.
        key_norms: gives the L1 norms of that layer's keys, all heads together, [B, M] in fp32.
        normed_states: gives ``hidden_BMD`` after the model's last norm, [B, M, D].
    """

    layer: int
    regions_BM: Tensor
    protected_BM: Tensor
    ranking_BM: Tensor
    prompt_BM: Tensor
    raters_BM: Tensor | None
    count_B: Tensor
    sample_seed_B: Tensor
    hidden_BMD: Tensor
    attention: AttentionBlocks
    rotary_pull: Callable[[Tensor], Iterator[Tensor]]
    key_norms: Callable[[], Tensor]
    normed_states: Callable[[], Tensor]

    @property
    def visual(self) -> Tensor:
        """Visual tokens, bool [B, M]."""
        return self.regions_BM == Region.VISUAL

    @property
    def question(self) -> Tensor:
        """Rows of the question that may rank, bool [B, M]."""
        return self.prompt_BM & (self.regions_BM == Region.QUERY)

    def attention_row(self, layer: int) -> Tensor:
        """Return the head-mean attention of the row ``ranking_BM``, [B, M] in fp32.

        It is what ``ReducerView.attention_row`` returns of a whole prompt.
        Only the layer below the cut has run last: ``layer`` must be that one.
        """
        assert layer == self.layer - 1
        return attention_paid(self.attention(self.ranking_BM))


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
    def cut(self, view: CutView) -> Cut:
        """Decide which rows stay."""

    def raters(self, embeds_BND: Tensor, regions_BN: Tensor, prompt_BN: Tensor) -> Tensor | None:
        """Return the rows whose attention later cuts read, chosen before layer 0; None where the cuts need none.

        Args:
            embeds_BND: input embeddings.
            regions_BN: ``Region`` codes.
            prompt_BN: rows of the prompt up to the last token of the turn that holds the last image, bool.
        """
        return None


class RankedCuts(DecoderReducer):
    """Every cut ranks the visual tokens by a score."""

    @abstractmethod
    def cut_scores(self, view: CutView) -> Tensor:
        """A score for every row, [B, M]; among visual tokens the highest stay."""

    def cut(self, view: CutView) -> Cut:
        """The best visual tokens stay; a protected visual row stays, inside the budget."""
        with torch.no_grad():
            scores_BM = self.cut_scores(view)
            kept = (scores_BM, view.regions_BM, view.protected_BM, view.count_B)
            return Cut(*keep_ranked(*kept, self.ranks, self.merges_dropped))


class StagedReducer(RankedCuts):
    """Cuts several times; ``keep_ratio`` is the average share of the visual tokens that all layers hold."""

    staged: ClassVar[bool] = True

    @property
    def stage(self) -> Stage:
        return "decoder"

    @abstractmethod
    def layer_shares(self, num_layers: int) -> list[Fraction]:
        """Share of the visual tokens that each layer holds, falling; their average is ``keep_ratio``.

        Rounded by less than 2^-30, down, or up with ``round_up``.
        """

    def layer_tokens(self, tokens: int, num_layers: int) -> list[int]:
        """See ``Reducer.layer_tokens``; of an anchor with ``matches``, all layers together are less than a token over.

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
        """The keep ratio itself."""
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


def attention_paid(blocks: Iterator[tuple[Tensor, Tensor]], over_heads: Literal["mean", "max"] = "mean") -> Tensor:
    """Attention that all rows of some blocks pay to each position, [B, M] in fp32.

    A row counts with the mean over its heads, or with the largest of them. A sample without rows gets zeros.
    """

    def summed(attention_BHRM: Tensor, valid_BR: Tensor) -> Tensor:
        rows_BRM = attention_BHRM.mean(1) if over_heads == "mean" else attention_BHRM.amax(1)
        return (rows_BRM * valid_BR[..., None]).sum(1)

    return reduce(torch.add, (summed(*block) for block in blocks))
