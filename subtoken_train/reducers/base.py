"""What a token reducer is. Reducers are gradient-free, and read prompt tokens only.

Legend: B batch, N positions, D model width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from subtoken_train.errors import MAX_SEED, MAX_TOKENS, check_range, unknown_name
from subtoken_train.functional.gather import keep_best, rank_candidates
from subtoken_train.ledger.ledger import check_keep_ratio, kept_count
from subtoken_train.types import MergedStates, Region, VisualStates

Stage = Literal["none", "tower", "embeds", "decoder", "context"]
PositionPolicy = Literal["original", "renumber", "mrope"]


@dataclass
class ReducerConfig:
    """Settings of the token reducer.

    Attributes:
        name: ``none``, ``random``, ``fastv``, ``visionzip`` or ``quest``.
        keep_ratio: r, tokens kept / tokens before, in (0, 1].
        round_up: round the kept count up (matched anchors) instead of down (routed arms).
        stage: where FastV cuts. ``embeds``: a no-grad scout ranks, then the shortened input starts again at layer 0
            (the paper's lengths count this); ``decoder``: the published FastV, rows leave at layer ``layer``.
        layer: FastV's L_f; the ranking is the attention of layer L_f - 1, counted from 0.
        seed: seed of the ``random`` reducer.
        page_size: Quest's tokens per page.
        window: Quest's last context tokens that always stay, inside the budget.
    """

    name: str = "fastv"
    keep_ratio: float = 1.0
    round_up: bool = False
    stage: Literal["embeds", "decoder"] = "embeds"
    layer: int = 2
    seed: int = 0
    page_size: int = 16
    window: int = 64

    def __post_init__(self) -> None:
        from subtoken_train.reducers import REDUCERS

        if self.name not in REDUCERS:
            raise unknown_name("reducer", self.name, REDUCERS)
        for name, low, high in (("layer", 1, 10_000), ("page_size", 1, MAX_TOKENS), ("window", 0, MAX_TOKENS)):
            check_range(f"reducer {name}", getattr(self, name), low, high)
        check_range("reducer seed", self.seed, 0, MAX_SEED)


@dataclass
class ReducerView:
    """What a reducer may look at.

    Attributes:
        regions_BN: ``Region`` codes.
        read_BN: rows that a token is read from, bool; they stay, whatever they score.
        rank_position_B: last prompt token of the turn that holds the last image; -1 without an image.
        sample_seed_B: a number per sample, int64.
        attention_row: layer -> head-mean attention of the row ``rank_position_B`` in that layer, [B, N] in fp32.
    """

    regions_BN: Tensor
    read_BN: Tensor
    rank_position_B: Tensor
    sample_seed_B: Tensor
    attention_row: Callable[[int], Tensor]


class Reducer:
    """Decides which tokens stay. Class attributes declare where it acts."""

    stage: Stage = "embeds"
    cut_layer: int = 0
    """First decoder layer that sees the reduced set."""
    scout_layers: int = 0
    """Layers whose attention the reducer reads: it may ask for rows of layers below this number."""
    ranks: bool = False
    """Whether its scores order the tokens that stay, which is what a ranked budget reads."""

    def __init__(self, config: ReducerConfig) -> None:
        check_keep_ratio(config.keep_ratio)
        self.config = config

    def kept_tokens(self, tokens: int) -> int:
        """Tokens kept of ``tokens``."""
        return kept_count(tokens, self.config.keep_ratio, self.config.round_up)

    def check_fit(self, backbone: str, sees_images: bool) -> None:
        """Raise a worded ``ValueError``: context reducers are for language models, the others for those that see."""
        if self.stage == "context" and sees_images:
            allowed = f"{backbone} takes fastv or visionzip"
            raise ValueError(f"reducer {self.config.name!r} evicts the context of a language model; {allowed}")
        if self.stage in ("tower", "embeds", "decoder") and not sees_images:
            raise ValueError(
                f"reducer {self.config.name!r} reduces visual tokens and {backbone} has none; use quest or none"
            )

    def check_ranks(self) -> None:
        """Raise a worded ``ValueError`` unless the reducer ranks the tokens that it keeps."""
        if not self.ranks or self.config.keep_ratio == 1:
            raise ValueError(
                f"budget 'ranked' follows the token reducer's ranking, but reducer {self.config.name!r} at "
                f"keep_ratio={self.config.keep_ratio:g} ranks nothing; take fastv with keep_ratio below 1, or budget "
                "per_token or global"
            )


class RankingReducer(Reducer, ABC):
    """Ranks the visual tokens of a sample in or before the language model (stages ``embeds`` and ``decoder``)."""

    @abstractmethod
    def scores(self, view: ReducerView) -> Tensor:
        """A score for every position, [B, N]; among visual tokens the highest stay."""

    @torch.no_grad()
    def select(self, view: ReducerView) -> tuple[Tensor, Tensor | None]:
        """Which positions stay, and in which order they were chosen.

        Returns:
            (keep_BN, rank_BN): bool, every real token but the visual ones that lost, all images of a sample ranked
            together; and the rank of each kept visual token by its score, int64, 0 is the sample's best, meaningless
            elsewhere, or None where the reducer does not rank. A visual row that a token is read from stays, inside the
            budget.
        """
        visual_BN = view.regions_BN == Region.VISUAL
        counts = [self.kept_tokens(tokens) if tokens else 0 for tokens in visual_BN.sum(-1).tolist()]
        read_BN = visual_BN & view.read_BN
        count_B = torch.maximum(torch.tensor(counts, device=visual_BN.device), read_BN.sum(-1))
        scores_BN = self.scores(view)
        kept_visual_BN = keep_best(scores_BN.masked_fill(read_BN, torch.inf), visual_BN, count_B)
        keep_BN = kept_visual_BN | (~visual_BN & (view.regions_BN != Region.PADDING))
        return keep_BN, rank_candidates(scores_BN, kept_visual_BN) if self.ranks else None


class TowerReducer(Reducer, ABC):
    """Acts on the vision tower's output, before the language model; its rows' positions are the family's to say."""

    stage = "tower"

    @abstractmethod
    def merge(self, states: VisualStates, read: list[Tensor]) -> MergedStates:
        """Fewer tokens for every image, and the placeholders that take them.

        Args:
            states: what the tower made.
            read: per image bool [T], the placeholders whose row a token is read from; they are taken, where the tokens
                that stay have places of their own.
        """


@dataclass
class ContextView:
    """What a context reducer may look at, in one layer, for prompt tokens only.

    Attributes:
        query_BHNd: rotated queries.
        key_BhNd: rotated keys; several query heads may share one.
        context_BN: the region that is compressed, bool.
        asks_BN: the query rows that choose, bool.
        context_counts: context tokens of each sample; counted once per pass, so that no layer waits for the device.
        asks_counts: query rows of each sample that choose.
    """

    query_BHNd: Tensor
    key_BhNd: Tensor
    context_BN: Tensor
    asks_BN: Tensor
    context_counts: list[int]
    asks_counts: list[int]


class ContextReducer(Reducer, ABC):
    """Evicts context tokens of a language model, in every layer its own set of the same size."""

    stage = "context"

    @abstractmethod
    def keep_context(self, view: ContextView) -> Tensor:
        """Context tokens that stay in this layer, bool [B, N]."""
