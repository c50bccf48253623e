"""The pages that a query reads of a block: nothing of the others' keys and values is touched.

They are gathered a stretch at a time, into memory small enough to stay in a processor's cache.

Legend: R rows of a block, c heads of a row, M entries, P pages, n pages read, d head width (of a payload: its stored
width), G query heads of a key-value head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from subtoken_train.functional.page_bound import page_bound
from subtoken_train.kernels.page_index import PageIndex
from subtoken_train.kernels.storage import Block, BlockPart, Payload

GATHERED = 2**19  # bytes that are gathered at a time


@dataclass
class Picked(Payload):
    """Some of a payload's vectors, gathered when they are read.

    Attributes:
        entry_RcM: their numbers, int64.
    """

    entry_RcM: Tensor

    @property
    def entries(self) -> int:
        """See ``Payload.entries``."""
        return self.entry_RcM.shape[2]

    @property
    def stretch(self) -> int:
        """See ``Payload.stretch``."""
        rows, heads = self.data.shape[:2]
        return max(1, GATHERED // (rows * heads * self.data.shape[-1] * self.data.element_size()))

    def narrow(self, axis: int, start: int, length: int) -> Picked:
        """See ``Payload.narrow``; entries alone."""
        assert axis == 2
        return Picked(self.data, self.scale, self.dtype, self.entry_RcM.narrow(2, start, length))

    def read(self) -> Tensor:
        """See ``Payload.read``."""
        return self.gathered().read()

    def gathered(self) -> Payload:
        """The vectors, copied, as they are stored."""
        rows, heads, entries, _ = self.data.shape
        first_Rc1 = torch.arange(rows * heads, device=self.data.device).view(rows, heads, 1) * entries
        place = (first_Rc1 + self.entry_RcM).flatten()

        def taken(vectors: Tensor) -> Tensor:
            own = vectors.view(-1, vectors.shape[-1]).index_select(0, place)
            return own.view(*self.entry_RcM.shape, vectors.shape[-1])

        return Payload(taken(self.data), None if self.scale is None else taken(self.scale), self.dtype)


def read_pages(block: Block, query_RcGd: Tensor) -> Block:
    """A block of the entries that one new token reads; every head has chosen its own pages.

    Args:
        block: with a page index, of one part that is stored whole.
        query_RcGd: rotated queries of one token.
    """
    pages, (part,) = block.pages, block.parts
    assert pages is not None
    assert isinstance(part.values, Payload)
    entry_Rcn = chosen_pages(pages, query_RcGd)[..., None] * pages.size
    entry_RcM = (entry_Rcn + torch.arange(pages.size, device=entry_Rcn.device)).flatten(2)
    whole = pages.low.shape[2] * pages.size
    left = part.entries - whole
    keys, values = (Picked(x.data, x.scale, x.dtype, entry_RcM) for x in (part.keys, part.values))
    chosen = BlockPart(keys, values)
    left_over = BlockPart(part.keys.narrow(2, whole, left), part.values.narrow(2, whole, left))
    return Block(block.rows, [chosen, left_over], numbers=block.numbers)


def chosen_pages(pages: PageIndex, query_RcGd: Tensor) -> Tensor:
    """Pages of every head, int64 [R, c, n]: the forced ones, then by Quest's bound, as its group's mean.

    In fp32, because in lower precision many pages tie; ties go to the earlier page.
    """
    query = query_RcGd.float()
    positive_Rcd, negative_Rcd = query.clamp(min=0).mean(2), query.clamp(max=0).mean(2)
    bound_RcP = page_bound(positive_Rcd, negative_Rcd, pages.low.float(), pages.high.float())
    bound_RcP = bound_RcP.masked_fill(pages.forced[:, None], torch.inf)
    return bound_RcP.sort(dim=-1, descending=True, stable=True).indices[..., : pages.count]
