"""Token reducers that evict context tokens of a language model, layer by layer.

Legend: B batch, N positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from subtoken_train.reducers.base import Reducer, Stage
from subtoken_train.view.view import Need, View


class ContextReducer(Reducer, ABC):
    """Evicts context tokens of a language model, in every layer its own set of the same size.

    A view's rows in scope are the context; queries, keys and values are those of prompt tokens, before any routing.
    """

    needs: ClassVar[frozenset[Need]] = frozenset()
    """Needs beside queries and keys, declared as an eviction declares them."""
    reads_question: ClassVar[bool] = True
    """True where the asking rows choose; a context then cannot be compressed before its question is there."""

    @property
    def stage(self) -> Stage:
        """In every layer of a language model."""
        return "context"

    @abstractmethod
    def keep_context(self, view: View) -> Tensor:
        """Context tokens that stay in this layer, bool [B, N]."""
