"""Pack one layer's dense keys and values: what a plan keeps, and nothing else.

Legend: B batch, h key-value heads, N rows of the prompt, d head width, S value groups, R rows of a block,
c heads of a row (h where heads share entries, else 1), M entries, P pieces of an entry, w channels of a piece.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from subtoken_train.functional.groups import Layout
from subtoken_train.kernels.storage import Block, Payload, RoutedValues, places_of

MAX_INDEX = 0.005  # share of the keys and values that an index may take; bits are taken where places do not fit


@dataclass(frozen=True)
class Packing:
    """How a layer is stored.

    Attributes:
        layout: of the value groups.
        kv_bits: 0 keeps the model's dtype; 8 and 4 store integers with a scale per key head and value piece.
    """

    layout: Layout = "contiguous"
    kv_bits: int = 0


def pack_layer(
    key_BhNd: Tensor, value_BhNd: Tensor, keep_BhN: Tensor, groups_BNS: Tensor | None, packing: Packing
) -> list[Block]:
    """Blocks with the kept entries of a layer.

    Args:
        key_BhNd: rotated keys of the prompt's rows.
        value_BhNd: their values.
        keep_BhN: entries that stay, bool; [B, 1, N] where all heads share a set.
        groups_BNS: kept value groups, bool; an entry with all S is stored whole, and so is every entry where it is
            None.
        packing: layout and precision.

    Rows of the batch that keep equally many entries, and equally many of them whole, share a block.
    """
    _, kv_heads, length, width = key_BhNd.shape
    shared = keep_BhN.shape[1] == 1
    heads = kv_heads if shared else 1
    keep_RN = keep_BhN.reshape(-1, length)
    keys, values = (x.reshape(-1, heads, length, width) for x in (key_BhNd, value_BhNd))
    whole_RN = torch.ones_like(keep_RN)
    bits_RSN = piece_bit = None
    if groups_BNS is not None:
        bits_RSN, piece_bit = _bits(groups_BNS, kv_heads, width, packing.layout, shared)
        whole_RN = groups_BNS.all(-1)[:, None].expand(-1, 1 if shared else kv_heads, -1).reshape(-1, length)
    counts = torch.stack([(keep_RN & ~whole_RN).sum(-1), (keep_RN & whole_RN).sum(-1)], dim=-1).tolist()
    alike: dict[tuple[int, int], list[int]] = {}
    for row, (routed, whole) in enumerate(counts):
        alike.setdefault((routed, whole), []).append(row)
    blocks = []
    for (routed, whole), members in alike.items():
        rows = torch.tensor(members, device=keep_RN.device)
        chosen = [x if len(alike) == 1 else x[rows] for x in (keys, values, keep_RN, whole_RN)]
        own_keys, own_values, own_keep, own_whole = chosen
        whole_index = _places(own_keep & own_whole, whole)
        block = Block(
            rows=None if len(alike) == 1 else rows,
            routed_keys=None,
            routed_values=None,
            whole_keys=Payload.store(_take(own_keys, whole_index), packing.kv_bits),
            whole_values=Payload.store(_take(own_values, whole_index), packing.kv_bits),
        )
        if routed:
            assert bits_RSN is not None
            assert piece_bit is not None
            index = _places(own_keep & ~own_whole, routed)
            own_bits = (bits_RSN if len(alike) == 1 else bits_RSN[rows]).gather(
                2, index[:, None].expand(-1, bits_RSN.shape[1], -1)
            )
            block.routed_keys = Payload.store(_take(own_keys, index), packing.kv_bits)
            block.routed_values = _routed_values(
                _take(own_values, index), own_bits, piece_bit, block.routed_keys, packing.kv_bits
            )
        blocks.append(block)
    return blocks


def _places(chosen_RN: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` marked entries of each row, ascending, int64 [R, count]."""
    return chosen_RN.nonzero()[:, 1].view(len(chosen_RN), count)


def _take(vectors_RcNd: Tensor, index_RM: Tensor) -> Tensor:
    """Entries of every head, [R, c, M, d]."""
    _, heads, _, width = vectors_RcNd.shape
    return vectors_RcNd.gather(2, index_RM[:, None, :, None].expand(-1, heads, -1, width))


def _bits(groups_BNS: Tensor, kv_heads: int, width: int, layout: Layout, shared: bool) -> tuple[Tensor, Tensor]:
    """What says which pieces of an entry are stored: flags bool [R, S, N], and each piece's flag, int64 [P].

    Where heads share their entries the flags are the groups themselves; else every head has the flags of its own
    pieces.
    """
    num_groups, device = groups_BNS.shape[-1], groups_BNS.device
    if layout == "per_head":
        piece_bit = torch.arange(num_groups, device=device).repeat(kv_heads)
    else:
        group_width = kv_heads * width // num_groups
        starts = torch.arange(0, kv_heads * width, math.gcd(group_width, width), device=device)
        piece_bit = starts.div(group_width, rounding_mode="floor")
    flags_BSN = groups_BNS.transpose(1, 2)
    if shared:
        return flags_BSN, piece_bit
    flags_BPN = flags_BSN.index_select(1, piece_bit)
    by_head = flags_BPN.reshape(len(flags_BPN), kv_heads, -1, flags_BPN.shape[-1])
    return by_head.flatten(0, 1), torch.arange(by_head.shape[2], device=device)


def _routed_values(
    value_RcMd: Tensor, flags_RSM: Tensor, piece_bit: Tensor, keys: Payload, kv_bits: int
) -> RoutedValues:
    """Keep the pieces that the flags name, piece by piece, and find them by the faster index that is small enough."""
    rows, heads, entries, _ = value_RcMd.shape
    flags_RPM = flags_RSM.index_select(1, piece_bit)
    pieces_RPMw = value_RcMd.reshape(rows, heads, entries, len(piece_bit) // heads, -1).transpose(2, 3).flatten(1, 2)
    counts = flags_RPM.sum(-1).flatten()
    pieces = Payload.store(pieces_RPMw[flags_RPM], kv_bits)
    index = places_of(flags_RPM, heads).to(torch.int32)
    if index.nbytes > MAX_INDEX * (keys.nbytes + pieces.nbytes):
        index = _pack_bits(flags_RSM)
    return RoutedValues(index, pieces, (counts.cumsum(0) - counts).int(), piece_bit.int(), entries, heads)


def _pack_bits(flags_RSM: Tensor) -> Tensor:
    """Eight flags a byte, the first in the lowest bit, uint8 [R, S, ceil(M / 8)]."""
    missing = -flags_RSM.shape[-1] % 8
    padded_RSM = torch.nn.functional.pad(flags_RSM.to(torch.uint8), (0, missing))
    places = torch.arange(8, dtype=torch.uint8, device=flags_RSM.device)
    packed: Tensor = (padded_RSM.view(*padded_RSM.shape[:2], -1, 8) << places).sum(-1, dtype=torch.uint8)
    return packed
