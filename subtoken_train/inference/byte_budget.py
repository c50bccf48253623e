"""How many entries a budget in bytes holds, in a layer of every sample.

What an entry takes is known beforehand only where all entries store as much. Heads that keep entries of their own, or
entries with more or fewer value groups than the mean, are counted once they are chosen, and chosen again among fewer
where they take too much.

Legend: B batch, M rows of a layer, h key-value heads, S value groups, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from subtoken_train.functional.groups import expand_group_mask
from subtoken_train.ledger.kv_budget import (
    KVBudget,
    KVShape,
    channel_index_bytes,
    entry_bytes,
    fill_bytes,
    kept_channels,
)
from subtoken_train.types import Layout, Region, in_compressed_region


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
    fixed_B = (cost_BM * ~competes_BM).sum(-1) + fill_bytes(shape, budget)
    fixed_B += channel_index_bytes(shape, budget.key_channels) * cut_BM.any(-1)
    # entries of unlike cost: the dearest are counted first, so that the bytes are never exceeded
    sums_BM = (cost_BM * competes_BM).sort(-1, descending=True).values.cumsum(-1)
    needed_B = (fixed_B + (cost_BM * competes_BM).amax(-1)) * shape.num_layers
    if bool((needed_B > allowed).any()):
        raise ValueError(
            f"eviction_keep={int(allowed)} bytes cannot hold the entries that always stay (text, and at least one "
            f"other entry per layer); {int(needed_B.max().ceil())} bytes would"
        )
    return (sums_BM <= (allowed / shape.num_layers - fixed_B)[:, None]).sum(-1)


def largest_choice(
    choose: Callable[[Tensor | None], list[Tensor]],
    bytes_of: Callable[[list[Tensor]], Tensor],
    most_B: Tensor,
    allowed: float,
) -> list[Tensor]:
    """A choice of entries that takes no more than the bytes, of as many entries as bisection finds.

    Args:
        choose: entries that stay, per layer bool [B, h, M], when no layer of a sample may keep more than a number of
            competing ones, int64 [B]; None: as many as were counted.
        bytes_of: what such a choice takes, [B].
        most_B: the largest number that changes anything.
        allowed: bytes of a sample.

    Raises:
        ValueError: one competing entry in each layer is too much.
    """
    kept = choose(None)
    fits_B = bytes_of(kept) <= allowed
    if bool(fits_B.all()):
        return kept
    low_B, high_B = torch.where(fits_B, most_B, torch.ones_like(most_B)), most_B
    while bool((low_B < high_B).any()):
        middle_B = (low_B + high_B + 1) // 2
        fits_B = bytes_of(choose(middle_B)) <= allowed
        low_B, high_B = torch.where(fits_B, middle_B, low_B), torch.where(fits_B, high_B, middle_B - 1)
    kept = choose(low_B)
    if bool(((needed_B := bytes_of(kept)) > allowed).any()):
        raise ValueError(
            f"eviction_keep={int(allowed)} bytes cannot hold what always stays and an entry for each head; "
            f"{int(needed_B.max())} bytes would"
        )
    return kept


def prompt_bytes(
    kept_LBhM: list[Tensor],
    masks: Sequence[Tensor | None],
    cuts_LBM: list[Tensor],
    key_channels: float,
    shape: KVShape,
    layout: Layout,
    beside: int = 0,
) -> Tensor:
    """What a choice of entries takes in all layers, int64 [B]: keys and values, and the numbers of key channels.

    Args:
        kept_LBhM: per layer the entries that stay, bool; h is 1 where all heads share a set.
        masks: per layer the value groups of every row, bool [B, M, S]; None: all of them.
        cuts_LBM: per layer the rows whose keys keep ``key_channels`` of their channels, bool.
        key_channels: a share of the channels.
        shape: cache geometry.
        layout: of the groups.
        beside: bytes that a layer which routes holds once for each sample.
    """
    width, heads = shape.head_dim, shape.num_kv_heads
    total_B = torch.zeros_like(kept_LBhM[0][:, 0, 0], dtype=torch.long)
    for kept_BhM, groups_BMS, cut_BM in zip(kept_LBhM, masks, cuts_LBM, strict=True):
        channels_BM1 = torch.where(cut_BM, kept_channels(width, key_channels), width)[..., None]
        if groups_BMS is None:
            channels_BMh = channels_BM1 + width
        else:
            values = expand_group_mask(groups_BMS, shape.value_dim, heads, layout)
            channels_BMh = channels_BM1 + values.view(*groups_BMS.shape[:2], heads, width).sum(-1)
            total_B += beside
        stored_B = (channels_BMh.transpose(1, 2) * kept_BhM.expand(-1, heads, -1)).sum((1, 2))
        total_B += stored_B * shape.element_bytes + channel_index_bytes(shape, key_channels) * cut_BM.any(-1)
    return total_B
