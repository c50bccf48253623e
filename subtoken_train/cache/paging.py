"""Page indices of a layer's packed blocks: full storage of which a step of decoding reads chosen pages.

Legend: B batch, R rows of a block, M entries of a plan or block, P pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from subtoken_train.cache.by_sample import select_part
from subtoken_train.kernels.page_index import PageIndex
from subtoken_train.kernels.storage import Block


@dataclass(frozen=True)
class PageReading:
    """How much of a layer a step reads.

    Attributes:
        size: entries of a page.
        least: pages that are read at least, what is left over after the whole ones counting as one.
        chosen_BM: entries of the layer's plan that a step chooses among, bool; pages with others are always read.
        budget_B: how many of these it reads at most, int64, unless ``least`` or what is always read are more.
    """

    size: int
    least: int
    chosen_BM: Tensor
    budget_B: Tensor


def with_pages(blocks: list[Block], reading: PageReading) -> list[Block]:
    """The blocks with their page indices; samples that read unlike numbers of pages come to lie in blocks of their own.

    A block without an index is read in full: it has no more than a step may read.

    Args:
        blocks: of one layer, whose heads share their entries and store them whole, in the plan's order.
        reading: of the layer.
    """
    paged = []
    for block in blocks:
        (part,) = block.parts
        keys_RcMd, size = part.keys.read(), reading.size
        rows_R = torch.arange(block.num_rows, device=keys_RcMd.device) if block.rows is None else block.rows
        number = part.entries // size
        chosen_RM = reading.chosen_BM[rows_R, : part.entries]
        forced_RP = ~chosen_RM[:, : number * size].reshape(block.num_rows, number, size).all(-1)
        if number * size == part.entries:
            forced_RP[:, -1:] = True  # the latest entries; a page that is begun holds them otherwise
        count_R = _counts(reading, rows_R, chosen_RM, forced_RP)
        for count in sorted(set(count_R.tolist())):
            own_R = (count_R == count).nonzero()[:, 0]
            all_alike = len(own_R) == block.num_rows
            own = Block(block.rows, [part]) if all_alike else Block(rows_R[own_R], [select_part(part, own_R)])
            if count < number:
                keys = keys_RcMd[own_R, :, : number * size]
                by_page = keys.reshape(*keys.shape[:2], number, size, keys.shape[-1])
                own.pages = PageIndex(size, count, by_page.amin(3), by_page.amax(3), forced_RP[own_R])
            paged.append(own)
    return paged


def _counts(reading: PageReading, rows_R: Tensor, chosen_RM: Tensor, forced_RP: Tensor) -> Tensor:
    """Whole pages that a step reads of each row, int64 [R]."""
    pages, size = forced_RP.shape[1], reading.size
    free_R = (~forced_RP).sum(-1)
    always_R = chosen_RM.sum(-1) - free_R * size  # of those it chooses among; pages that are not forced hold no others
    spare_R = (reading.budget_B[rows_R] - always_R).clamp(min=0) // size
    begun = int(chosen_RM.shape[1] > pages * size)
    return (pages - free_R + spare_R).clamp(min=reading.least - begun).clamp(max=pages)
