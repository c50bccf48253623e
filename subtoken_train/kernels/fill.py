"""What pieces of routed entries that are not stored read as, in one layer.

An entry's piece is stored without it: a head's probabilities of its routed entries, summed, weigh it once.

Legend: B batch, h key-value heads, R rows of a block, c heads of a row, X = B * h, d head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Fill:
    """A value vector per sample.

    Attributes:
        vectors_Bhd: of every sample, the last axis contiguous; a view of [1, h, d] where all have the same.
        stored: whether the cache holds them; False: they are a weight of the model, of any dtype.
    """

    vectors_Bhd: Tensor
    stored: bool

    @property
    def nbytes(self) -> int:
        """Bytes that the cache holds of it."""
        return self.vectors_Bhd.nbytes if self.stored else 0

    def select(self, samples: Tensor) -> Fill:
        """Of the samples, int64, in their order."""
        if not self.stored:
            return Fill(self.vectors_Bhd[:1].expand(len(samples), -1, -1), False)
        return Fill(self.vectors_Bhd.index_select(0, samples.to(self.vectors_Bhd.device)), True)

    def of_heads(self, dtype: torch.dtype) -> Tensor:
        """Of every head of every sample, [X, 1, d]."""
        return self.vectors_Bhd.to(dtype).flatten(0, 1)[:, None]

    def of_rows(self, heads: int, dtype: torch.dtype) -> Tensor:
        """Of every row of the cache, with so many heads, [R, c, 1, d]."""
        return self.vectors_Bhd.to(dtype).reshape(-1, heads, 1, self.vectors_Bhd.shape[-1])
