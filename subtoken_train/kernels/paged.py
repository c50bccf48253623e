"""The pages that a query reads of a block, gathered: nothing of the others' keys and values is touched.

Legend: R rows of a block, c heads of a row, M entries, P pages, n pages read, d head width (of a payload: its stored
width), G query heads of a key-value head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subtoken_train.functional.page_bound import page_bound
from subtoken_train.kernels.page_index import PageIndex
from subtoken_train.kernels.storage import Block, BlockPart, Payload


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
    chosen = BlockPart(_taken(part.keys, entry_RcM), _taken(part.values, entry_RcM))
    left_over = BlockPart(part.keys.narrow(2, whole, left), part.values.narrow(2, whole, left))
    return Block(block.rows, [chosen, left_over])


def chosen_pages(pages: PageIndex, query_RcGd: Tensor) -> Tensor:
    """Pages of every head, int64 [R, c, n]: the forced ones, then by Quest's bound, as its group's mean.

    In fp32, because in lower precision many pages tie; ties go to the earlier page.
    """
    query = query_RcGd.float()
    positive_Rcd, negative_Rcd = query.clamp(min=0).mean(2), query.clamp(max=0).mean(2)
    bound_RcP = page_bound(positive_Rcd, negative_Rcd, pages.low.float(), pages.high.float())
    bound_RcP = bound_RcP.masked_fill(pages.forced[:, None], torch.inf)
    return bound_RcP.sort(dim=-1, descending=True, stable=True).indices[..., : pages.count]


def _taken(payload: Payload, entry_RcM: Tensor) -> Payload:
    """Entries of every head, as they are stored."""
    rows, heads, entries, _ = payload.data.shape
    first_Rc1 = torch.arange(rows * heads, device=entry_RcM.device).view(rows, heads, 1) * entries
    place = (first_Rc1 + entry_RcM).flatten()

    def taken(vectors: Tensor) -> Tensor:
        return vectors.view(-1, vectors.shape[-1]).index_select(0, place).view(*entry_RcM.shape, vectors.shape[-1])

    return Payload(taken(payload.data), None if payload.scale is None else taken(payload.scale), payload.dtype)
