"""Tail, window and fill: all that attention reads of a layer beside its packed entries.

The *tail* is everything appended since the prompt. A *reach* hides by position what a sliding window has passed. A
*fill* is what pieces of routed entries that are not stored read as: an entry's piece is stored without it, and the sum
of a head's probabilities of its routed entries weighs it once.

Legend: B batch, h key-value heads, H query heads, R rows of a block, c heads of a row, X = B * h, M entries of a part,
T places of the tail's room, N = all entries of a row and its tail, d head width, q new tokens, G query rows of a head
(of q new tokens, the newest last, tokens fastest).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from subtoken_train.kernels.storage import Block


@dataclass(frozen=True)
class Tail:
    """Keys and values appended since the prompt, in full and causal; the q new tokens are the last.

    Attributes:
        room_keys_BhTd: keys; places after the last token hold finite numbers that nothing reads.
        start_B: first real token of each sample, where tails are padded on the left; padding is seen by nothing but
            itself. None: none is.
        written: the same number as ``length``, int64 [1] on the device, where all steps must have one shape
            (captured, compiled): then ``length`` is not read. None otherwise.
    """

    room_keys_BhTd: Tensor
    room_values_BhTd: Tensor
    length: int
    start_B: Tensor | None = None
    written: Tensor | None = None

    @property
    def keys(self) -> Tensor:
        """Keys that are there, [B, h, T, d]; under ``written`` the whole room."""
        return self.room_keys_BhTd if self.written is not None else self.room_keys_BhTd.narrow(2, 0, self.length)

    @property
    def values(self) -> Tensor:
        """Values that are there, [B, h, T, d]; under ``written`` the whole room."""
        return self.room_values_BhTd if self.written is not None else self.room_values_BhTd.narrow(2, 0, self.length)

    def own_places(self, new: int) -> Tensor:
        """Return the places of the new tokens, int64 [q]."""
        offsets = torch.arange(new, device=self.room_keys_BhTd.device)
        return offsets + (self.length - new if self.written is None else self.written - new)


@dataclass(frozen=True)
class CacheWindow:
    """Sliding window over a cache.

    Attributes:
        size: positions that a token sees, its own included.
        first_B: position of each sample's first tail place; those that follow count on.
    """

    size: int
    first_B: Tensor

    def of_rows(self, rows: Tensor | None, heads: int = 1) -> CacheWindow:
        """Return the window of a block's rows (None: all rows): samples, or ``heads`` heads of each."""
        first_R = self.first_B if heads == 1 else self.first_B.repeat_interleave(heads)
        return CacheWindow(self.size, first_R if rows is None else first_R[rows])

    def hidden(self, block: Block, tail: int, own_q: Tensor, columns: int) -> Tensor:
        """Mark what the window hides from the query rows of a block, bool [R, 1, N, G]."""
        first_R1 = self.first_B[:, None]
        places_T = torch.arange(tail, device=first_R1.device)
        stored = [part.position_RM for part in block.parts if part.position_RM is not None]
        position_RN = torch.cat([*stored, first_R1 + places_T], 1)
        own_RG = first_R1 + own_q.repeat(columns // len(own_q))
        return (own_RG[:, None, None] - position_RN[:, None, :, None]) >= self.size


@dataclass(frozen=True)
class Fill:
    """Value vector per sample that stands for pieces that are not stored.

    Attributes:
        vectors_Bhd: of every sample, the last axis contiguous; a view of [1, h, d] where all have the same.
        stored: whether the cache holds them; False: they are a weight of the model, of any dtype.
    """

    vectors_Bhd: Tensor
    stored: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the vectors that the cache holds."""
        return self.vectors_Bhd.nbytes if self.stored else 0

    def select(self, samples: Tensor) -> Fill:
        """Return the fill of chosen samples, int64, in their order."""
        if not self.stored:
            return Fill(self.vectors_Bhd[:1].expand(len(samples), -1, -1), False)
        return Fill(self.vectors_Bhd.index_select(0, samples.to(self.vectors_Bhd.device)), True)

    def of_heads(self, dtype: torch.dtype) -> Tensor:
        """Return the vectors by heads of samples, [X, 1, d]."""
        return self.vectors_Bhd.to(dtype).flatten(0, 1)[:, None]

    def of_rows(self, heads: int, dtype: torch.dtype) -> Tensor:
        """Return the vectors by rows of ``heads`` heads, [R, c, 1, d]."""
        return self.vectors_Bhd.to(dtype).reshape(-1, heads, 1, self.vectors_Bhd.shape[-1])
