"""Token reducers that evict context tokens of a language model, layer by layer.

Legend: B batch, N positions, H query heads, h key-value heads, d head width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from subtoken_train.functional.rotary import Rotation
from subtoken_train.reducers.base import Reducer, Stage


@dataclass(kw_only=True)
class ContextView:
    """What a context reducer may look at, in one layer, for prompt tokens only.

    Attributes:
        layer: its number, from 0.
        query_BHNd: rotated queries.
        key_BhNd: rotated keys; several query heads may share one.
        value_BhNd: values before any routing.
        scale: factor of the attention scores.
        regions_BN: ``Region`` codes.
        position_BN: position ids of the rows.
        rotate: what turns queries and keys at given position ids [B, N].
        context_BN: the region that is compressed, bool.
        asks_BN: the query rows that choose, bool.
        context_counts: context tokens of each sample; counted once per pass, so that no layer waits for the device.
        asks_counts: query rows of each sample that choose.
    """

    layer: int
    query_BHNd: Tensor
    key_BhNd: Tensor
    value_BhNd: Tensor
    scale: float
    regions_BN: Tensor
    position_BN: Tensor
    rotate: Callable[[Tensor], Rotation]
    context_BN: Tensor
    asks_BN: Tensor
    context_counts: list[int]
    asks_counts: list[int]


class ContextReducer(Reducer, ABC):
    """Evicts context tokens of a language model, in every layer its own set of the same size."""

    reads_question: ClassVar[bool] = True
    """Whether the rows that ask choose; then a context cannot be compressed before its question is there."""

    @property
    def stage(self) -> Stage:
        """In every layer of a language model."""
        return "context"

    @abstractmethod
    def keep_context(self, view: ContextView) -> Tensor:
        """Context tokens that stay in this layer, bool [B, N]."""
