"""Measure what a plan keeps: ledger rows, and the regions of a prompt that are left without an entry.

Legend: B batch, N positions, S value groups, R regions.
"""

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from subtoken_train.functional.gather import take_rows
from subtoken_train.functional.groups import expand_group_mask
from subtoken_train.ledger.kv_budget import KVShape, number_bytes
from subtoken_train.ledger.ledger import Entry, Ledger
from subtoken_train.types import LayerPlan, Layout, Plan, Region


def measured_ledger(plan: Plan, regions_BN: Tensor, shape: KVShape) -> Ledger:
    """Count a plan's entries and (token, group) pairs per layer and region, summed over the batch.

    Bytes are what a packed cache of this plan takes. Where heads keep entries of their own, ``tokens`` counts entries
    that any head keeps, and bytes the heads' own parts. A sample's fill counts as values of the compressed region; its
    basis as keys of the first region with a cut key, or of the first one.
    """
    entries = []
    for index, layer in enumerate(plan.layers):
        cut, valid = layer.cut_keys, layer.entries_BN >= 0
        heads = valid.new_ones(shape.num_kv_heads) if layer.heads_BNh is None else layer.heads_BNh
        regions = take_rows(regions_BN, layer.entries_BN.clamp(min=0)).masked_fill(~valid, Region.PADDING)
        present = [region for region in torch.unique(regions_BN).tolist() if region != Region.PADDING]
        thin = [] if cut is None else [each for each in present if bool((cut.entries_BN & (regions == each)).any())]
        for region in present:
            kept = regions == region
            before, label = int((regions_BN == region).sum()), Region(region).label
            keys, values, found = _bytes(layer, kept, shape, plan.layout)
            if layer.filled and region in (Region.VISUAL, Region.CONTEXT):
                values += len(layer.entries_BN) * shape.side_bytes
            if cut is not None and region in thin:
                slices = int((heads & (cut.entries_BN & kept)[..., None]).sum())
                keys -= slices * (shape.head_dim - cut.kept) * shape.element_bytes
            if cut is not None and region == (thin or present)[0]:  # what is stored once for all regions
                found += int((heads & cut.entries_BN[..., None]).any(1).sum()) * cut.kept * number_bytes(shape.head_dim)
                keys += 0 if cut.turn is None else cut.turn.nbytes
            entries.append(Entry(index, label, before, int(kept.sum()), keys, values, found))
    return Ledger(shape, tuple(entries))


def _named(layer: LayerPlan) -> Tensor:
    """Mark the entries whose groups an index names, bool [B, N]: those in part, where a sample's differ."""
    assert layer.group_mask_BNS is not None
    groups_BNS = layer.group_mask_BNS
    partial_BN = (layer.entries_BN >= 0) & ~groups_BNS.all(-1)
    if not partial_BN.shape[1]:
        return partial_BN
    first_B1S = groups_BNS.take_along_dim(partial_BN.int().argmax(1)[:, None, None], 1)
    return partial_BN & (partial_BN & (groups_BNS != first_B1S).any(-1)).any()


def _bytes(layer: LayerPlan, kept_BN: Tensor, shape: KVShape, layout: Layout) -> tuple[int, int, int]:
    head_bytes, heads, groups = shape.side_bytes // shape.num_kv_heads, layer.heads_BNh, layer.group_mask_BNS
    count = int(kept_BN.sum())
    slices = count * shape.num_kv_heads if heads is None else int(heads[kept_BN].sum())
    if groups is None:
        return slices * head_bytes, slices * head_bytes, 0
    chosen, num_groups = groups[kept_BN], groups.shape[-1]
    partial = _named(layer)[kept_BN]
    if heads is None:
        values = int(chosen.sum()) * shape.side_bytes // num_groups
        return slices * head_bytes, values, int(partial.sum()) * math.ceil(num_groups / 8)
    channels = expand_group_mask(chosen, shape.value_dim, shape.num_kv_heads, layout)
    channels = channels.view(count, shape.num_kv_heads, shape.head_dim)
    values = int((channels & heads[kept_BN][..., None]).sum()) * shape.element_bytes
    pieces = shape.num_kv_heads * num_groups
    if layout == "contiguous":
        pieces = shape.value_dim // math.gcd(shape.value_dim // num_groups, shape.head_dim)
    return slices * head_bytes, values, math.ceil(int(heads[kept_BN][partial].sum()) * pieces // shape.num_kv_heads / 8)


def emptied_regions(plan: Plan, regions_BN: Tensor, held_LBN: Sequence[Tensor]) -> list[dict[str, int]]:
    """Count for each sample, region by region, the layers in which compression left no head an entry of it.

    ``held_LBN``: rows that each layer holds without compression, bool: fewer where it attends in a window.
    """
    codes_R = torch.tensor([region for region in Region if region != Region.PADDING], device=regions_BN.device)
    layers_BR = torch.zeros(len(regions_BN), len(codes_R), dtype=torch.long, device=regions_BN.device)
    for layer, held_BN in zip(plan.layers, held_LBN, strict=True):
        had_BR = ((regions_BN[..., None] == codes_R) & held_BN[..., None]).any(1)
        kept_BN = take_rows(regions_BN, layer.entries_BN.clamp(min=0)).masked_fill(layer.entries_BN < 0, Region.PADDING)
        layers_BR += had_BR & ~(kept_BN[..., None] == codes_R).any(1)
    names = [Region(code).label for code in codes_R.tolist()]
    return [{name: n for name, n in zip(names, row, strict=True) if n} for row in layers_BR.tolist()]


def emptied_words(
    emptied: Sequence[dict[str, int]], compression: str, remedy: str = "Keep more (eviction_keep), or use scope context"
) -> str | None:
    """Warn of emptied regions, on one line; None where every region keeps something."""
    if not (prompts := Counter(region for sample in emptied for region in sample)):
        return None
    regions = ", ".join(f"{region} ({count:,} of {len(emptied):,} prompts)" for region, count in prompts.items())
    return f"{compression}: nothing is left of a whole region in some layer: {regions}. {remedy}"
