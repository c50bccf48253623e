"""Evictions that free nothing and say what a step of decoding reads: what they go with, and their pages in the cache.

Legend: B batch, M rows of a layer, N entries of a plan.
"""

from __future__ import annotations

from subtoken_train.cache.paging import PageReading, with_pages
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.functional.gather import take_rows
from subtoken_train.inference.compression import Compression, EvictionPass
from subtoken_train.kernels.storage import Block
from subtoken_train.types import LayerPlan


def check_reading(backbone: CompressedBackbone, compression: Compression) -> None:
    """Raise a worded ``ValueError`` where a method that ``reads`` meets what it does not go with."""
    method = compression.eviction
    if method is None or not method.reads:
        return
    if compression.unit == "bytes":
        raise ValueError(
            f"eviction {method.name!r} frees no bytes, so its budget cannot be bytes; eviction_keep says what a step "
            "reads: a share such as 0.25, or a number of tokens"
        )
    if compression.merging != "none":
        raise ValueError(f"eviction {method.name!r} lets nothing go that could be merged; leave merge out")
    if compression.key_channels != 1:
        raise ValueError(f"eviction {method.name!r} reads pages of whole keys; take key_channels=1 with it")
    if backbone.active_routing is not None:
        raise ValueError(
            f"eviction {method.name!r} reads pages of whole values, and the routers keep value groups of each entry; "
            "take an arm without routing (selector none), or another eviction"
        )


def paged(blocks: list[Block], eviction: EvictionPass | None, layer: int, kept: LayerPlan) -> list[Block]:
    """A layer's blocks, with a page index where a step of decoding reads pages of it."""
    sizes = None if eviction is None or not eviction.method.reads else eviction.method.pages(layer)
    if sizes is None:
        return blocks
    assert eviction is not None
    assert eviction.candidates is not None
    assert kept.rows_BN is not None
    competes_BM, budget_LB = eviction.candidates.competes_LBN[layer], eviction.candidates.budget_LB
    chosen_BN = take_rows(competes_BM, kept.rows_BN) & (kept.entries_BN >= 0)
    return with_pages(blocks, PageReading(*sizes, chosen_BN, budget_LB[layer]))
