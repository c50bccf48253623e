"""Base classes of token reducers. Reducers are gradient-free, and read prompt tokens only.

Legend: B batch, N positions, D model width.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor

from subtoken_train.errors import refuse
from subtoken_train.functional.gather import keep_best, rank_candidates
from subtoken_train.ledger import kv_budget
from subtoken_train.types import MergedStates, Region, TowerStatistics, VisualStates
from subtoken_train.view.method import Method
from subtoken_train.view.view import Need, View

PositionPolicy = Literal["original", "renumber", "mrope"]


class Cut(NamedTuple):
    """Decision of what stays; every sample keeps all but visual rows."""

    keep_BM: Tensor  # rows that stay, bool
    rank_BM: Tensor | None  # rank of each visual token that stays, int64, 0 is the sample's best; None: no ranking
    joins_BM: Tensor | None = None
    """The row that each row joins, int64, itself or one that stays and is from here on the mean of all that join it."""
    policy: PositionPolicy = "original"
    """``renumber``: kept rows count anew and end where the prompt did. Under mRoPE rows keep their own positions."""


def keep_ranked(
    scores_BN: Tensor, regions_BN: Tensor, read_BN: Tensor, count_B: Tensor, ranks: bool, merges: bool = False
) -> Cut:
    """Keep the best visual tokens of each sample (``read_BN`` first) and all other rows."""
    visual_BN = regions_BN == Region.VISUAL
    read_BN = visual_BN & read_BN
    count_B = torch.maximum(count_B, read_BN.sum(-1))
    kept_BN = keep_best(scores_BN.float().masked_fill(read_BN, torch.inf), visual_BN, count_B)
    keep_BN = kept_BN | (~visual_BN & (regions_BN != Region.PADDING))
    rank_BN = rank_candidates(scores_BN, kept_BN) if ranks else None
    if not merges:
        return Cut(keep_BN, rank_BN)
    # the worst that nothing reads holds the mean of all that is dropped, is joined by it, and ranks last
    free_BN, dropped_BN = kept_BN & ~read_BN, visual_BN & ~kept_BN
    worst_BN = free_BN & (rank_candidates(scores_BN, free_BN) == free_BN.sum(-1, keepdim=True) - 1)
    slot_BN = worst_BN & dropped_BN.any(-1, keepdim=True)
    rows_BN = torch.arange(slot_BN.shape[1], device=slot_BN.device).expand(slot_BN.shape)
    goes_BN = dropped_BN & slot_BN.any(-1, keepdim=True)
    joins_BN = torch.where(goes_BN, slot_BN.long().argmax(-1, keepdim=True), rows_BN)
    if rank_BN is not None:
        slot_rank_B1 = rank_BN.masked_fill(~slot_BN, -1).amax(-1, keepdim=True)
        closed_BN = rank_BN - ((slot_rank_B1 >= 0) & (rank_BN > slot_rank_B1)).long()
        rank_BN = torch.where(slot_BN, kept_BN.sum(-1, keepdim=True) - 1, closed_BN)
    return Cut(keep_BN, rank_BN, joins_BN)


def shared_out(sizes: Sequence[int], kept: int) -> list[int]:
    """Share ``kept`` tokens out over pictures of these tokens, exactly; the last of any has one at least."""
    total, passed = sum(sizes), accumulate(sizes[:-1], initial=0)
    upto = [min((2 * kept * before + total) // (2 * total), kept - 1) for before in passed if total]
    return [after - before for before, after in pairwise([*upto, kept])]


Stage = Literal["none", "tower", "embeds", "decoder", "context"]
Tower = Collection[TowerStatistics]
_OF_ALL = ("name", "keep_ratio", "round_up", "matches")


ReducerView = View
"""The name up to version 0.3, by which reducers written for it import it."""


@dataclass(frozen=True, kw_only=True)
class Reducer(Method):
    """One method with its settings: decides which tokens stay. A frozen dataclass; its fields are the settings.

    Attributes:
        name: by which it is registered; the same in every instance.
        keep_ratio: r, tokens kept / tokens before, in (0, 1].
        round_up: round the kept count up (matched anchors) instead of down (routed arms).
        matches: of a matched anchor, the keep ratio of its routed arm: the anchor keeps ceil(arm_tokens * keep_ratio /
            matches) tokens, at least the arm's bytes, less than one token more.
    """

    name: str
    keep_ratio: float = 1.0
    round_up: bool = False
    matches: float | None = None

    staged: ClassVar[bool] = False
    """True where it cuts at several layers; its keep ratio is then an average over layers."""
    ranks: ClassVar[bool] = False
    """True where its scores order the tokens that stay, which a ranked budget reads."""
    reads_question: ClassVar[bool] = False
    """True where the question's rows choose; a context then cannot be compressed before its question is there."""
    reads_frames: ClassVar[bool] = False
    """True where it chooses among the frames of videos, and takes no images."""
    fixed_count: ClassVar[bool] = True
    """Every prompt keeps exactly ``kept_tokens``; otherwise it keeps at most that many."""
    scout_layers: ClassVar[int] = 0
    """Layers whose attention the reducer reads: it may ask for rows of layers below this number."""
    frozen_scout: ClassVar[bool] = False
    """The scout's rows come from the backbone alone, without LoRA."""
    merges_dropped: ClassVar[bool] = False
    """The dropped tokens of a sample go on as one token, their mean, inside the budget."""

    def __post_init__(self) -> None:
        super().__post_init__()
        kv_budget.check_share("keep_ratio", self.keep_ratio)
        if self.matches is not None:
            given = f"reducer matches={self.matches:g}"
            outside = f"{given} must lie in (0, 1]: the keep ratio of the anchor's arm"
            alone = f"{given} is for matched anchors, which round up; set round_up: true, or leave it out"
            refuse((not 0 < self.matches <= 1, outside), (not self.round_up, alone))

    @property
    def acts(self) -> bool:
        """Return whether it leaves tokens out; at a keep ratio of 1 no reducer does."""
        return self.keep_ratio < 1

    @property
    def stage(self) -> Stage:
        """Return the stage it acts at."""
        return "embeds"

    def cut_layer(self, num_layers: int) -> int:
        """Return the first decoder layer that sees fewer tokens, and the first whose values are routed."""
        return 0

    @property
    def words(self) -> str:
        """Its own settings, for people; empty where it has none."""
        return self._own()

    def _own(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in asdict(self).items() if key not in _OF_ALL)

    def kept_tokens(self, tokens: int) -> int:
        """Return how many of ``tokens`` stay; at least one of a non-empty set."""
        if self.matches is None:
            return kv_budget.kept_count(tokens, self.keep_ratio, self.round_up)
        return min(tokens, kv_budget.matched_count(kv_budget.kept_count(tokens, self.matches), self.arm_bytes))

    @property
    def arm_bytes(self) -> Fraction:
        """Return what a token of the matched arm takes, of a whole one; 1 where nothing is matched."""
        return Fraction(1) if self.matches is None else kv_budget.exact(self.keep_ratio) / kv_budget.exact(self.matches)

    def running_tokens(self, tokens: int, num_layers: int) -> list[int]:
        """Return how many of ``tokens`` each layer computes: what goes from the cache alone is computed."""
        return [tokens] * num_layers if self.stage == "context" else self.layer_tokens(tokens, num_layers)

    def layer_tokens(self, tokens: int, num_layers: int) -> list[int]:
        """Return how many of ``tokens`` each layer's cache holds."""
        cut = self.cut_layer(num_layers)
        return [tokens] * cut + [self.kept_tokens(tokens)] * (num_layers - cut)

    def kept_words(self, tokens: int, num_layers: int) -> str:
        """Say how many of ``tokens`` stay: a number, or those after the first and the last cut."""
        return kv_budget.count_words(self.layer_tokens(tokens, num_layers), tokens)

    def mean_share(self, num_layers: int) -> Fraction:
        """Return the share of the tokens that all layers hold on average, before counts are rounded."""
        cut = self.cut_layer(num_layers)
        return (cut + (num_layers - cut) * kv_budget.exact(self.keep_ratio)) / num_layers

    def at_share(self, share: Fraction, num_layers: int) -> Self:
        """Return the method at another average, rounded up from this one's counts: what its matched anchor keeps."""
        ratio = kv_budget.ratio_above_cut(share, num_layers, self.cut_layer(num_layers))
        return replace(self, keep_ratio=float(ratio), round_up=True, matches=self.keep_ratio)

    def check_fit(self, backbone: str, sees_images: bool, num_layers: int, tower: Tower = ()) -> None:
        """Raise a worded ``ValueError`` where it does not fit a backbone, whose tower says ``tower`` of its tokens."""
        own, places = f"reducer {self.name!r}", ("tower", "embeds", "decoder")
        context = f"{own} evicts the context of a language model; {backbone} takes fastv or visionzip"
        visual = f"{own} reduces visual tokens and {backbone} has none; use quest or none"
        refuse((self.stage == "context" and sees_images, context), (self.stage in places and not sees_images, visual))
        deep = self.scout_layers > num_layers or self.cut_layer(num_layers) >= num_layers
        refuse((deep, f"{own} with {self._own()} does not fit a model of {num_layers} layers"))

    def check_anchor(self) -> None:
        """Raise a worded ``ValueError`` where no keep ratio has the bytes of a routed arm."""
        count = f"reducer {self.name!r} with {self._own()} keeps a different number of tokens of each image"
        refuse((not self.fixed_count, f"{count}, so no keep ratio has the same bytes; fix the count (adaptive: false)"))

    def check_ranks(self) -> None:
        """Raise a worded ``ValueError`` unless the reducer ranks the tokens that it keeps."""
        idle = f"reducer {self.name!r} at keep_ratio={self.keep_ratio:g} ranks nothing"
        instead = "use fastv with keep_ratio below 1, or budget per_token or global"
        unranked = not (self.ranks and self.acts)
        refuse((unranked, f"budget 'ranked' follows the token reducer's ranking, but {idle}; {instead}"))


class RankingReducer(Reducer, ABC):
    """Ranks the visual tokens of a sample in or before the language model (stages ``embeds`` and ``decoder``)."""

    @abstractmethod
    def scores(self, view: View) -> Tensor:
        """Score every position, [B, N]; of the visual tokens the highest stay."""

    @torch.no_grad()
    def select(self, view: View) -> Cut:
        """Choose the rows that stay, all images of a sample ranked together."""
        count_B = torch.tensor(self.kept_counts(view.visual), device=view.regions_BN.device)
        kept = (self.scores(view), view.regions_BN, view.protected_BN, count_B)
        return keep_ranked(*kept, self.ranks, self.merges_dropped)

    def kept_counts(self, visual_BN: Tensor) -> list[int]:
        """Return how many of the marked tokens of each sample stay."""
        return [self.kept_tokens(tokens) if tokens else 0 for tokens in visual_BN.sum(-1).tolist()]


_READS: dict[TowerStatistics, str] = {
    "received": "the attention that a tower's tokens receive",
    "class": "a class token's attention",
    "unsplit": "a class token's attention in one head as wide as the layer",
}


class TowerReducer(Reducer, ABC):
    """Acts on the vision tower's output, before the language model; its rows' positions are the family's to say."""

    stage: ClassVar[Stage] = "tower"
    statistics: ClassVar[TowerStatistics] = "received"
    """Statistics that it reads; a family declares what its tower gives (``Family.tower_statistics``)."""
    keeps_places: ClassVar[bool] = False
    """True where each token that stays is one of the image's, in its own slot, in every family."""

    def check_fit(self, backbone: str, sees_images: bool, num_layers: int, tower: Tower = ()) -> None:
        super().check_fit(backbone, sees_images, num_layers, tower)
        allowed = "visionzip or fastv" if "received" in tower else "fastv"
        lacks = f"which the vision tower of {backbone} does not give; use {allowed}"
        refuse((self.statistics not in tower, f"reducer {self.name!r} ranks by {_READS[self.statistics]}, {lacks}"))

    def image_counts(self, states: VisualStates) -> list[int]:
        """Divide a sample's ``kept_tokens`` among its images by size; the last keeps one."""
        sizes = [len(tokens_TC) for tokens_TC in states.tokens]
        counts = []
        for first, end in pairwise(accumulate(states.images_per_sample or [1] * len(sizes), initial=0)):
            counts += shared_out(sizes[first:end], self.kept_tokens(sum(sizes[first:end])))
        return counts

    @abstractmethod
    def merge(self, states: VisualStates, read: list[Tensor]) -> MergedStates:
        """Merge every image's tokens to fewer, and pick their placeholders; ``read``: [T] per image, rows that stay."""


class TowerChoice(TowerReducer):
    """A tower reducer whose tokens that stay are the image's own, in their places."""

    keeps_places: ClassVar[bool] = True

    @abstractmethod
    def kept(self, states: VisualStates, image: int, kept: int, read_T: Tensor) -> Tensor:
        """Mark the tokens of an image that stay, bool [T]: ``kept`` of them, those that a token is read from first."""

    @torch.no_grad()
    def merge(self, states: VisualStates, read: list[Tensor]) -> MergedStates:
        counts = self.image_counts(states)
        slots = [self.kept(states, image, *each) for image, each in enumerate(zip(counts, read, strict=True))]
        tokens = [tokens_TC[slots_T] for tokens_TC, slots_T in zip(states.tokens, slots, strict=True)]
        return MergedStates(tokens, slots)


class ContextReducer(Reducer, ABC):
    """Evicts context tokens (a view's rows in scope) of a language model, as many in every layer, before routing."""

    needs: ClassVar[frozenset[Need]] = frozenset()
    """Needs beside queries and keys, declared as an eviction declares them."""
    stage: ClassVar[Stage] = "context"
    reads_question: ClassVar[bool] = True

    @abstractmethod
    def keep_context(self, view: View) -> Tensor:
        """Mark the context tokens that stay in this layer, bool [B, N]."""


def matched_reducer(reducer: Reducer, routed: kv_budget.KVBudget, num_layers: int, tokens: int) -> Reducer:
    """Return the same reducer at the keep ratio that the ledger solves for, its counts rounded up from the arm's.

    It holds the arm's bytes and less than a token more, at every length; what an arm stores once per sample is paid for
    at ``tokens``. ``routed`` is what the arm stores of a token that its reducer keeps; its keep ratio is not read.
    """
    if reducer.name == "none":
        raise ValueError("it has no token reducer, so there is nothing that could keep fewer tokens instead")
    reducer.check_anchor()
    whole = kv_budget.KVBudget(key_channels=routed.key_channels)
    routed = replace(routed, keep_ratio=1.0)
    per_token = routed.exact_total / whole.exact_total
    beside = (routed.total_of(tokens) - routed.exact_total) / whole.exact_total
    below = Fraction(reducer.cut_layer(num_layers), num_layers)
    share = below + (reducer.mean_share(num_layers) - below) * per_token + (1 - below) * beside
    return reducer.at_share(share, num_layers)
