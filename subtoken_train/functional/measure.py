"""What a plan really keeps, as ledger rows.

Legend: B batch, N positions, S value groups.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from subtoken_train.functional.gather import take_rows
from subtoken_train.functional.ledger import Entry, KVShape, Ledger
from subtoken_train.types import Plan, Region


def measured_ledger(plan: Plan, regions_BN: Tensor, shape: KVShape) -> Ledger:
    """Count a plan's entries and (token, group) pairs per layer and region, summed over the batch.

    Bytes are what a packed cache of this plan takes (a bit per group of entries that keep fewer than S), not what a
    dense cache with zeroed groups occupies.

    Args:
        plan: one ``LayerPlan`` per layer.
        regions_BN: ``Region`` codes of the unreduced batch.
        shape: cache geometry.
    """
    entries = []
    for index, layer in enumerate(plan.layers):
        valid = layer.entries_BN >= 0
        regions = take_rows(regions_BN, layer.entries_BN.clamp(min=0)).masked_fill(~valid, Region.PADDING)
        for region in torch.unique(regions_BN).tolist():
            if region == Region.PADDING:
                continue
            kept = regions == region
            count = int(kept.sum())
            value_bytes, index_bytes = count * shape.side_bytes, 0
            if layer.group_mask_BNS is not None:
                num_groups = layer.group_mask_BNS.shape[-1]
                groups = layer.group_mask_BNS.sum(-1)[kept]
                value_bytes = int(groups.sum()) * shape.side_bytes // num_groups
                index_bytes = int((groups < num_groups).sum()) * math.ceil(num_groups / 8)
            before = int((regions_BN == region).sum())
            label = Region(region).label
            entries.append(Entry(index, label, before, count, count * shape.side_bytes, value_bytes, index_bytes))
    return Ledger(shape, tuple(entries))
