"""Kept sets of ``recall_peers.py``: which entries of a context stay here, and which in kvpress.

Legend: L layers, h key-value heads, N entries of a context.
"""

from __future__ import annotations

from typing import Any

import torch

from subtoken_train.cache.cache import PackedCache
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.evictions.base import Eviction
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import open_prompts
from subtoken_train.types import Batch


@torch.no_grad()
def compare_sets(
    batches: list[Batch], backbone: CompressedBackbone, method: Eviction, theirs: dict[str, list[Any]]
) -> dict[str, Any]:
    """Our kept sets beside kvpress's at each share, entry by entry: contexts that are equal, entries that are not.

    Args:
        batches: the contexts.
        backbone: that reads them.
        method: ours.
        theirs: for each share, of every context (scores or None, marks of what stays), [L, h, N] each.

    ``widest`` is the largest distance, in their scores, of an entry that one side alone keeps from the worst that they
    keep in that head: 0 where all of these are ties.
    """
    found: dict[str, Any] = {}
    for kept, noted in theirs.items():
        compression, following = Compression(method, float(kept)), iter(noted)
        equal = differing = entries = 0
        widest = 0.0
        for batch in batches:
            cache = PackedCache(backbone.family.shape.num_layers)
            plan = open_prompts(backbone, batch, cache, compression, "context_first").plan
            for row in range(len(batch.regions_BN)):
                scores, stays = next(following)
                mine = torch.zeros_like(stays)
                for layer, part in enumerate(plan.layers):
                    real = part.entries_BN[row] >= 0
                    heads = True if part.heads_BNh is None else part.heads_BNh[row, real].T
                    mine[layer][:, part.entries_BN[row, real]] = heads
                apart = mine ^ stays
                equal += not apart.any()
                differing, entries = differing + int(apart.sum()), entries + int(stays.sum())
                if scores is not None:
                    worst = scores.masked_fill(~stays, torch.inf).amin(-1, keepdim=True)
                    widest = max(widest, float((scores - worst).abs().masked_fill(~apart, 0).max()))
        found[kept] = {
            "contexts_equal": equal,
            "entries_kept": entries,
            "entries_that_one_side_keeps": differing,
            "widest": widest,
        }
    return found
