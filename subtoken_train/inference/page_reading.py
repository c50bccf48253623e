"""Evictions that free nothing and say what a step of decoding reads: what they go with, and their pages in the cache.

Legend: B batch, M rows of a layer, N entries of a plan.
"""

from __future__ import annotations

from subtoken_train.cache.cache import PackedCache
from subtoken_train.cache.packed_layer import PackedLayer
from subtoken_train.cache.paging import PageReading, with_pages
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.functional.gather import take_rows
from subtoken_train.functional.moving import on_device
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.eviction_pass import EvictionPass
from subtoken_train.types import Plan


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


def add_pages(cache: PackedCache, plan: Plan, eviction: EvictionPass) -> None:
    """Add a page index to the layers of a filled cache of which a step of decoding reads pages."""
    for layer, (packed, kept) in enumerate(zip(cache.layers, plan.layers, strict=True)):
        assert isinstance(packed, PackedLayer)
        sizes = eviction.method.pages(layer)
        if sizes is not None:
            assert kept.rows_BN is not None
            competes_BM, budget_B = eviction.budgets[layer]
            chosen_BN = take_rows(competes_BM, kept.rows_BN) & (kept.entries_BN >= 0)
            marks = on_device([chosen_BN, budget_B], packed.device)
            packed.blocks = with_pages(packed.blocks, PageReading(*sizes, *marks))
