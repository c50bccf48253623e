"""Pack one layer's dense keys and values: what a plan keeps, and nothing else.

Legend: B batch, h key-value heads, N rows of the prompt, d head width, S value groups, R rows of a block,
c heads of a row (h where heads share entries, else 1), M entries of the plan, P pieces of an entry, w channels of a
piece.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from subtoken_train.kernels.bit_index import pack_bits
from subtoken_train.kernels.choice import choose_kernel
from subtoken_train.kernels.storage import Block, BlockPart, Payload, RoutedValues, places_of
from subtoken_train.types import LayerPlan, Layout

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
    key_BhNd: Tensor, value_BhNd: Tensor, plan: LayerPlan, packing: Packing, position_BN: Tensor | None = None
) -> list[Block]:
    """Blocks with the kept entries of a layer.

    Args:
        key_BhNd: rotated keys of the prompt's rows.
        value_BhNd: their values.
        plan: entries that stay, by the rows that they are; one with all S value groups is stored whole.
        packing: layout and precision.
        position_BN: of the rows, in a layer with a window, whose entries keep theirs; None: it has none.

    Rows of the batch that keep equally many entries, equally many of them whole and with a whole key, share a block.
    """
    _, kv_heads, length, width = key_BhNd.shape
    valid_BM, groups_BMS, shared = plan.entries_BN >= 0, plan.group_mask_BNS, plan.heads_BNh is None
    rows_BM = plan.entries_BN.clamp(min=0) if plan.rows_BN is None else plan.rows_BN
    keys, values, keep_RM, row_RM = key_BhNd, value_BhNd, valid_BM, rows_BM
    if plan.heads_BNh is not None:
        keys, values = (x.reshape(-1, 1, length, width) for x in (key_BhNd, value_BhNd))
        keep_RM = (plan.heads_BNh & valid_BM[..., None]).transpose(1, 2).flatten(0, 1)
        row_RM = rows_BM.repeat_interleave(kv_heads, 0)
    places_RN = None if position_BN is None else position_BN.int().repeat_interleave(len(keep_RM) // len(key_BhNd), 0)
    whole_RM = torch.ones_like(keep_RM)
    bits_RSM = piece_bit = None
    if groups_BMS is not None:
        bits_RSM, piece_bit = _bits(groups_BMS, kv_heads, width, packing.layout, shared)
        whole_RM = groups_BMS.all(-1)
        whole_RM = whole_RM if shared else whole_RM.repeat_interleave(kv_heads, 0)
    cut_RM, channels_Rck = _cut_rows(plan, kv_heads, keep_RM)
    kinds = [
        (routed, cut, keep_RM & (whole_RM != routed) & (cut_RM == cut))
        for routed, cut in ((True, True), (True, False), (False, True), (False, False))
    ]
    alike: dict[tuple[int, ...], list[int]] = {}
    for row, counts in enumerate(torch.stack([marks.sum(-1) for *_, marks in kinds], dim=-1).tolist()):
        alike.setdefault(tuple(counts), []).append(row)
    blocks = []
    for counts, members in alike.items():
        rows = None if len(alike) == 1 else torch.tensor(members, device=keep_RM.device)
        own_keys, own_values, own_row = (x if rows is None else x[rows] for x in (keys, values, row_RM))
        own_bits, channels = (x if rows is None or x is None else x[rows] for x in (bits_RSM, channels_Rck))
        parts = []
        for (routed, cut, marks), count in zip(kinds, counts, strict=True):
            if not count and (routed or cut):
                continue
            places = _places(marks if rows is None else marks[rows], count)
            index = own_row.gather(1, places)
            stored = Payload.store(_take(own_keys, index, channels if cut else None), packing.kv_bits)
            value_RcMd = _take(own_values, index)
            stands = None if places_RN is None else places_RN[members].gather(1, index)
            if routed:
                assert own_bits is not None
                assert piece_bit is not None
                flags = own_bits.gather(2, places[:, None].expand(-1, own_bits.shape[1], -1))
                kept = _routed_values(value_RcMd, flags, piece_bit, stored, packing.kv_bits)
                parts.append(BlockPart(stored, kept, cut, stands))
            else:
                parts.append(BlockPart(stored, Payload.store(value_RcMd, packing.kv_bits), cut, stands))
        blocks.append(Block(rows, parts, channels if any(part.cut for part in parts) else None))
    return blocks


def _cut_rows(plan: LayerPlan, kv_heads: int, keep_RM: Tensor) -> tuple[Tensor, Tensor | None]:
    """Entries whose keys are cut, bool [R, M], and the numbers of the channels that they keep, [R, c, k]."""
    cut, shared = plan.cut_keys, plan.heads_BNh is None
    if cut is None:
        return torch.zeros_like(keep_RM), None
    channels_Bhk = cut.channels_Bhd.nonzero()[:, 2].view(*cut.channels_Bhd.shape[:2], -1)
    channels_Bhk = channels_Bhk.to(torch.uint8 if cut.channels_Bhd.shape[2] <= 256 else torch.int16)
    if shared:
        return cut.entries_BN, channels_Bhk
    return cut.entries_BN.repeat_interleave(kv_heads, 0), channels_Bhk.flatten(0, 1)[:, None]


def _places(chosen_RM: Tensor, count: int) -> Tensor:
    """Places of the ``count`` marked entries of each row, ascending, int64 [R, count]."""
    return chosen_RM.nonzero()[:, 1].view(len(chosen_RM), count)


def _take(vectors_RcNd: Tensor, index_RM: Tensor, channels_Rck: Tensor | None = None) -> Tensor:
    """Entries of every head, [R, c, M, d], or [R, c, M, k] in chosen channels."""
    rows, heads = (torch.arange(size, device=index_RM.device) for size in vectors_RcNd.shape[:2])
    taken = vectors_RcNd[rows[:, None, None], heads[:, None], index_RM[:, None]]  # gather takes twice as long
    if channels_Rck is None:
        return taken
    return taken.gather(3, channels_Rck.long()[:, :, None].expand(-1, -1, index_RM.shape[1], -1))


def _bits(groups_BMS: Tensor, kv_heads: int, width: int, layout: Layout, shared: bool) -> tuple[Tensor, Tensor]:
    """What says which pieces of an entry are stored: flags bool [R, S, M], and each piece's flag, int64 [P].

    Where heads share their entries the flags are the groups themselves; else every head has the flags of its own
    pieces.
    """
    num_groups, device = groups_BMS.shape[-1], groups_BMS.device
    if layout == "per_head":
        piece_bit = torch.arange(num_groups, device=device).repeat(kv_heads)
    else:
        group_width = kv_heads * width // num_groups
        starts = torch.arange(0, kv_heads * width, math.gcd(group_width, width), device=device)
        piece_bit = starts.div(group_width, rounding_mode="floor")
    flags_BSM = groups_BMS.transpose(1, 2)
    if shared:
        return flags_BSM, piece_bit
    flags_BPM = flags_BSM.index_select(1, piece_bit)
    by_head = flags_BPM.reshape(len(flags_BPM), kv_heads, -1, flags_BPM.shape[-1])
    return by_head.flatten(0, 1), torch.arange(by_head.shape[2], device=device)


def _routed_values(
    value_RcMd: Tensor, flags_RSM: Tensor, piece_bit: Tensor, keys: Payload, kv_bits: int
) -> RoutedValues:
    """Keep the pieces that the flags name, piece by piece, and find them by the faster index that is small enough."""
    rows, heads, entries, _ = value_RcMd.shape
    pieces_RPMw = value_RcMd.reshape(rows, heads, entries, len(piece_bit) // heads, -1).transpose(2, 3).flatten(1, 2)
    pieces = Payload.store(pieces_RPMw[flags_RSM.index_select(1, piece_bit)], kv_bits)
    return with_index(pieces, flags_RSM, piece_bit, keys)


def with_index(pieces: Payload, flags_RSM: Tensor, piece_bit: Tensor, keys: Payload) -> RoutedValues:
    """Stored pieces with what finds their entries.

    Args:
        pieces: in the order of ``RoutedValues.pieces``.
        flags_RSM: what each entry stores, bool, by its S bits.
        piece_bit: which of the bits rules each piece.
        keys: of the same entries.
    """
    flags_RPM, heads = flags_RSM.index_select(1, piece_bit), keys.data.shape[1]
    counts = flags_RPM.sum(-1).flatten()
    index = places_of(flags_RPM, heads).to(torch.int32)
    fused = choose_kernel(index.device.type).path == "triton"  # reads bits
    if fused or index.nbytes > MAX_INDEX * (keys.nbytes + pieces.nbytes):
        index = pack_bits(flags_RSM)
    return RoutedValues(index, pieces, (counts.cumsum(0) - counts).int(), piece_bit.int(), flags_RSM.shape[-1], heads)
