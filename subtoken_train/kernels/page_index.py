"""What says which pages of a block a step of decoding reads: the smallest and largest key channels of every page.

Legend: R rows of a block, c heads of a row, P pages, d head width.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class PageIndex:
    """Whole pages of consecutive entries; what is left over after the last one is no page and always read.

    Attributes:
        size: entries of a page.
        count: pages that every head reads in a step, fewer than P.
        low: smallest value of each key channel in a page, [R, c, P, d].
        high: largest value.
        forced: pages that are always read, bool [R, P]; at most ``count`` of each row.
    """

    size: int
    count: int
    low: Tensor
    high: Tensor
    forced: Tensor

    def select(self, index_R: Tensor) -> PageIndex:
        """The index of some rows, copied."""
        return PageIndex(self.size, self.count, *(x[index_R] for x in (self.low, self.high, self.forced)))

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, all of which a step reads."""
        return self.low.nbytes + self.high.nbytes + self.forced.nbytes
