"""What a KV eviction method is: after the prompt's pass it says which cached entries stay, per layer and head.

A method sees one layer at a time (``LayerView``), leaves its scores, and plans when all layers have been seen. What it
reads of the attention is declared in ``needs``; nothing else is computed. It acts after prefill, so it cannot change
the first generated token; it never sees a generated token. A method that wants to know what a reader would look for,
where no question is there to say it, has the prompt run a second time as a task (``TaskView``): it declares
``second_pass`` in ``needs``, says for which samples (``second_pass``) and scores their entries anew (``score_task``).

Legend: B batch, N cached rows of the prompt, S rows of a task, K = N + S, H query heads, h key-value
heads, d head width, L layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from subtoken_train.evictions.observers import last_marked
from subtoken_train.functional.attention_statistics import attention_blocks, attention_rows
from subtoken_train.types import Region

Scope = Literal["context", "all", "visual"]
"""``context``: what is VISUAL or CONTEXT (``visual`` is another word for it); ``all``: every entry of the prompt."""
Need = Literal["rows", "blocks", "key_norms", "value_norms", "second_pass"]
"""``rows``: attention of a few chosen rows; ``blocks``: all rows of a region, a block at a time; ``second_pass``: the
attention that the prompt, run a second time, pays to its cached entries."""


@dataclass
class LayerView:
    """One layer of a prompt pass, as an eviction method sees it.

    Attributes:
        layer: its number, from 0.
        query_BHNd: rotated queries.
        key_BhNd: rotated keys.
        value_BhNd: values as they are cached (after routing: dropped groups are 0).
        regions_BN: ``Region`` codes of the rows; PADDING marks what is no entry of this layer's cache.
        scale: factor of the attention scores.
        needs: the statistics that the method declared; asking for another is a fault of the method.
        in_scope_BN: rows that the scope names, bool; None: all entries.
        entries_BN: rows that are entries of the cache, bool.
    """

    layer: int
    query_BHNd: Tensor
    key_BhNd: Tensor
    value_BhNd: Tensor
    regions_BN: Tensor
    scale: float
    needs: frozenset[Need]
    in_scope_BN: Tensor | None = None
    entries_BN: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.entries_BN = self.regions_BN != Region.PADDING
        if self.in_scope_BN is None:
            self.in_scope_BN = self.entries_BN

    def rows(self, index_BW: Tensor, keys_BN: Tensor | None = None) -> Tensor:
        """Attention of chosen rows, see ``attention_rows``; over all entries unless ``keys_BN`` says otherwise."""
        assert "rows" in self.needs
        keys_BN = self.entries_BN if keys_BN is None else keys_BN
        return attention_rows(self.query_BHNd, self.key_BhNd, index_BW, keys_BN, self.scale)

    def blocks(self, rows_BN: Tensor, keys_BN: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Attention of all marked rows, a block at a time, see ``attention_blocks``."""
        assert "blocks" in self.needs
        keys_BN = self.entries_BN if keys_BN is None else keys_BN
        return attention_blocks(self.query_BHNd, self.key_BhNd, rows_BN, keys_BN, self.scale)

    def key_norms(self) -> Tensor:
        """Euclidean norms of the keys, [B, h, N] in fp32."""
        assert "key_norms" in self.needs
        norms: Tensor = self.key_BhNd.float().norm(dim=-1)
        return norms

    def value_norms(self) -> Tensor:
        """Euclidean norms of the cached values, [B, h, N] in fp32."""
        assert "value_norms" in self.needs
        norms: Tensor = self.value_BhNd.float().norm(dim=-1)
        return norms

    def window(self, count: int) -> Tensor:
        """An observation window: the last ``count`` entries of the prompt, bool [B, N].

        Where anything follows what is in scope, the window does not reach into that: what follows stays anyway, so the
        window costs nothing of the budget.
        """
        assert self.in_scope_BN is not None
        following_BN = self.entries_BN & (self.in_scope_BN.flip(-1).cumsum(-1).flip(-1) == 0)
        rows_BN = torch.where(following_BN.any(-1, keepdim=True), following_BN, self.entries_BN)
        return last_marked(rows_BN, count)

    def last_rows(self, window: int) -> Tensor:
        """Index of the last ``window`` entries of every sample, ascending, [B, W]; -1 pads samples with fewer."""
        count_B1 = self.entries_BN.sum(-1, keepdim=True)
        order_BN = self.entries_BN.int().sort(dim=-1, descending=True, stable=True).indices
        slot_BW = count_B1 - window + torch.arange(window, device=order_BN.device)
        index_BW = order_BN.gather(1, slot_BW.clamp(min=0))
        return index_BW.masked_fill(slot_BW < 0, -1)


@dataclass
class TaskView:
    """One layer of a second pass, as an eviction method sees it: a task's rows look back at a prompt's entries.

    Attributes:
        layer: its number, from 0.
        query_BHSd: rotated queries of the task.
        key_BhKd: rotated keys of the prompt's rows, then of the task's.
        value_BhNd: values as they are cached, of the prompt.
        regions_BN: as in ``LayerView``, of the prompt.
        rows_BS: rows of the task that are no padding, bool.
        scale: factor of the attention scores.
    """

    layer: int
    query_BHSd: Tensor
    key_BhKd: Tensor
    value_BhNd: Tensor
    regions_BN: Tensor
    rows_BS: Tensor
    scale: float

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Attention that the task's rows pay to the prompt's, as ``LayerView.blocks`` yields it.

        A row's softmax runs over the prompt's entries and the task's rows up to itself; the columns of the latter are
        left out, so that a row sums to less than 1.
        """
        length = self.regions_BN.shape[1]
        keys_BK = torch.cat([self.regions_BN != Region.PADDING, self.rows_BS], 1)
        for index_BW, probability_BHWK in attention_blocks(
            self.query_BHSd, self.key_BhKd, self.rows_BS, keys_BK, self.scale, offset=length
        ):
            yield index_BW, probability_BHWK[..., :length]

    def value_norms(self) -> Tensor:
        """Euclidean norms of the prompt's cached values, [B, h, N] in fp32."""
        norms: Tensor = self.value_BhNd.float().norm(dim=-1)
        return norms


@dataclass
class LayerScores:
    """What a method noted of one layer.

    Attributes:
        scores_BhN: the higher, the sooner an entry stays; fp32, [B, h, N], or [B, 1, N] where all heads share a set.
        protected_BN: entries that always stay and count in the budget (a recent window, attention sinks), bool.
        weight_B: the layer's claim on the budget, for methods that divide it between layers; fp32.
        notes: further numbers of a method, by name.
    """

    scores_BhN: Tensor
    protected_BN: Tensor
    weight_B: Tensor | None = None
    notes: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Candidates:
    """What may be evicted, and how much of it may stay.

    Attributes:
        regions_LBN: ``Region`` codes of every layer's rows (layers can differ in which rows are entries).
        competes_LBN: entries that the method chooses among, bool; all other entries stay and are not in the budget.
        budget_LB: entries that may stay of them, int64, per layer and sample, the same in every layer of a sample
            unless layers have different numbers of entries. A method may move entries between layers, not add any.
    """

    regions_LBN: list[Tensor]
    competes_LBN: list[Tensor]
    budget_LB: Tensor


class Eviction(ABC):
    """One method with its settings; a frozen dataclass whose fields are the settings with their published defaults."""

    name: ClassVar[str]
    needs: ClassVar[frozenset[Need]] = frozenset()
    needs_image: ClassVar[bool] = False
    """A method for models that see images: refused on a text model, and for prompts without an image."""

    @property
    def reads_question(self) -> bool:
        """Whether it says nothing of a prompt whose question is not there yet: refused under ``context_first``."""
        return self.needs_image

    @abstractmethod
    def score(self, view: LayerView) -> LayerScores:
        """Look at one layer."""

    def second_pass(self, regions_BN: Tensor) -> Tensor:
        """Samples whose entries a second pass over the prompt scores, bool [B]: none unless a method needs it."""
        return torch.zeros_like(regions_BN[:, 0], dtype=torch.bool)

    def score_task(self, view: TaskView) -> Tensor:
        """Look at one layer of the second pass: scores that replace those of ``score``, [B, h, N] or [B, 1, N]."""
        raise AssertionError(f"{self.name} needs no second pass")

    def counts(self, scores: list[LayerScores], candidates: Candidates) -> Tensor:
        """Entries that stay per layer and sample, int64 [L, B]: the same budget in every layer unless overridden."""
        return candidates.budget_LB

    def keep(self, scores: list[LayerScores], candidates: Candidates) -> list[Tensor]:
        """Entries that stay, per layer bool [B, h, N] (h = 1: one set for all heads), entries that do not compete too.

        Protected entries come first, then the best scores; ties go to the lower index. Every sample keeps at least one
        entry of those that compete, and never more than its count.
        """
        count_LB = self.counts(scores, candidates)
        kept = []
        for layer, competes_BN in enumerate(candidates.competes_LBN):
            best_BhN = keep_best_entries(
                scores[layer].scores_BhN, competes_BN, scores[layer].protected_BN, count_LB[layer]
            )
            others_BN = (candidates.regions_LBN[layer] != Region.PADDING) & ~competes_BN
            kept.append(best_BhN | others_BN[:, None])
        return kept


def keep_best_entries(scores_BhN: Tensor, competes_BN: Tensor, protected_BN: Tensor, count_B: Tensor) -> Tensor:
    """The ``count_B`` best of the competing entries per head, bool [B, h, N].

    Protected entries come before all others, the latest first; a count below 1 is 1 where anything competes. Ties go to
    the lower index. Entries that score NaN are a fault of the method.
    """
    assert not bool(scores_BhN.isnan().any())
    length = scores_BhN.shape[-1]
    places_N = torch.arange(length, device=scores_BhN.device)
    lowest = torch.finfo(torch.float32).min
    scores = scores_BhN.float().clamp(min=lowest)
    # three sorts, least significant first, each stable: score, then place for protected entries, then the class
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    late_BN = torch.where(protected_BN, places_N, -1)
    class_BN = torch.where(competes_BN, torch.where(protected_BN, 2, 1), 0)
    for key_BN in (late_BN, class_BN):
        key = key_BN[:, None].expand_as(scores).gather(-1, order)
        order = order.gather(-1, key.sort(dim=-1, descending=True, stable=True).indices)
    rank = torch.empty_like(order).scatter_(-1, order, places_N.expand_as(order))
    return (rank < count_B.clamp(min=1)[:, None, None]) & competes_BN[:, None]
