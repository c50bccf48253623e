"""How many entries a budget in bytes holds, in a layer of every sample.

Legend: B batch, M rows of a layer.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from subtoken_train.ledger.kv_budget import KVBudget, KVShape, channel_index_bytes, entry_bytes
from subtoken_train.types import Region, in_compressed_region


def entries_for_bytes(
    allowed: float, shape: KVShape, regions_BM: Tensor, competes_BM: Tensor, cut_BM: Tensor, budget: KVBudget
) -> Tensor:
    """Competing entries that may stay in a layer, int64 [B], beside all others, which stay.

    Args:
        allowed: bytes of a sample's whole prompt cache; every layer gets as many.
        shape: cache geometry.
        regions_BM: ``Region`` codes of the rows, PADDING where a row is no entry.
        competes_BM: entries that the budget chooses among, bool.
        cut_BM: entries whose keys keep ``budget.key_channels`` only, bool.
        budget: what an entry of the compressed region stores.

    Raises:
        ValueError: the budget does not hold what always stays and one more entry in each layer.
    """
    in_region_BM = in_compressed_region(regions_BM)
    cost_BM = torch.zeros(regions_BM.shape, dtype=torch.float64, device=regions_BM.device)
    for thin_BM, channels in ((~cut_BM, 1.0), (cut_BM, budget.key_channels)):
        for own_BM, stored in ((in_region_BM, budget), (~in_region_BM, KVBudget())):
            cost_BM[thin_BM & own_BM] = entry_bytes(shape, replace(stored, key_channels=channels))
    cost_BM = cost_BM.masked_fill(regions_BM == Region.PADDING, 0)
    fixed_B = (cost_BM * ~competes_BM).sum(-1) + channel_index_bytes(shape, budget.key_channels) * cut_BM.any(-1)
    # entries of unlike cost: the dearest are counted first, so that the bytes are never exceeded
    sums_BM = (cost_BM * competes_BM).sort(-1, descending=True).values.cumsum(-1)
    needed_B = (fixed_B + (cost_BM * competes_BM).amax(-1)) * shape.num_layers
    if bool((needed_B > allowed).any()):
        raise ValueError(
            f"eviction_keep={int(allowed)} bytes cannot hold the entries that always stay (text, and at least one "
            f"other entry per layer); {int(needed_B.max().ceil())} bytes would"
        )
    return (sums_BM <= (allowed / shape.num_layers - fixed_B)[:, None]).sum(-1)
