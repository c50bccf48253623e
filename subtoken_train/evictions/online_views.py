"""What an eviction method sees while tokens are decoded: one layer's stored entries, and the last rows' queries.

Heads that hold entries of their own are rows of the batch: a row is then one head of one sample, with one key head and
its query heads. Heads that share their entries stay together, and a row is a sample.

Legend: B batch, h key-value heads, R rows (B, or B * h), N entries, W chosen rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from subtoken_train.evictions.layer_views import LayerView
from subtoken_train.functional.attention_statistics import attention_blocks, attention_rows

_OF_PROMPTS = frozenset({"position", "next_position", "rotate", "output_weight"})
"""Of a ``LayerView``, what there is of a prompt's rows alone."""


@dataclass(frozen=True)
class Online:
    """How a method evicts while tokens are decoded.

    Attributes:
        rows: last query rows that it reads, at most those since the last eviction; None: all of these.
    """

    rows: int | None = None


@dataclass
class OnlineView(LayerView):
    """A ``LayerView`` whose entries are all that a layer holds, oldest first, and whose queries are those of the last.

    Attributes:
        place_RN: number of each entry among all tokens that the layer has seen of its sample, from 0; padding: any.
        seen_R: how many those are, int64.
        heads: rows of the batch that are heads of one sample.
    """

    place_RN: Tensor = field(kw_only=True)
    seen_R: Tensor = field(kw_only=True)
    heads: int = field(kw_only=True)

    def __getattribute__(self, name: str) -> Any:
        """Read an attribute; what only a prompt's pass has raises a worded ``ValueError``."""
        found = super().__getattribute__(name)
        if found is None and name in _OF_PROMPTS:
            raise ValueError(
                f"an eviction reads {name} of its view while tokens are decoded, where there is none; score without "
                "it, or let its online be None, so that eviction_every refuses the method"
            )
        if name == "query_BHNd" and not found.shape[2]:
            raise ValueError(
                "an eviction reads queries while tokens are decoded and says that it reads none: let its online say "
                "how many of the last rows (Online(rows=...))"
            )
        return found

    @property
    def _first(self) -> int:
        """Entries before the first query row."""
        return self.key_BhNd.shape[2] - self.query_BHNd.shape[2]

    def rows(self, index_BW: Tensor, keys_BN: Tensor | None = None) -> Tensor:
        """As ``LayerView.rows``; rows whose queries are gone pay no attention."""
        self.check_declared("rows()", "rows")
        index_BW = torch.where(index_BW < self._first, -1, index_BW - self._first)
        keys_BN = self.entries_BN if keys_BN is None else keys_BN
        return attention_rows(self.query_BHNd, self.key_BhNd, index_BW, keys_BN, self.scale, self._first)

    def blocks(self, rows_BN: Tensor, keys_BN: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """As ``LayerView.blocks``; rows whose queries are gone are left out."""
        self.check_declared("blocks()", "blocks")
        keys_BN = self.entries_BN if keys_BN is None else keys_BN
        chosen_BN = rows_BN[:, self._first :]
        for index_BW, probability_BHWN in attention_blocks(
            self.query_BHNd, self.key_BhNd, chosen_BN, keys_BN, self.scale, offset=self._first
        ):
            yield torch.where(index_BW < 0, -1, index_BW + self._first), probability_BHWN

    def viewers(self) -> Tensor:
        """As ``LayerView.viewers``: those that are gone have seen what came before them."""
        return self.seen_R[:, None] - self.place_RN

    def head_mean(self, scores_BhN: Tensor) -> Tensor:
        """As ``LayerView.head_mean``, entry by entry: a head that let an entry go counts 0 for it."""
        if self.heads == 1:
            return super().head_mean(scores_BhN)
        by_sample = (len(scores_BhN) // self.heads, -1)
        place_BM = self.place_RN.masked_fill(~self.entries_BN, 0).reshape(by_sample)
        scores_BM = scores_BhN.masked_fill(~self.entries_BN[:, None], 0.0).reshape(by_sample)
        total_BP = scores_BM.new_zeros(len(place_BM), int(self.seen_R.max())).scatter_add(1, place_BM, scores_BM)
        return total_BP.gather(1, place_BM).view_as(scores_BhN) / self.heads
