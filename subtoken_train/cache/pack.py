"""Pack one layer's dense keys and values: what a plan keeps, and nothing else.

Legend: B batch, h key-value heads, N rows of the prompt, d head width, S value groups, R rows of a block,
c heads of a row (h where heads share entries, else 1), M entries of the plan, P pieces of an entry, w channels of a
piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from subtoken_train.cache.plan_marks import PlanMarks, RowCounts, plan_marks, read_counts
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
    key_BhNd: Tensor,
    value_BhNd: Tensor,
    plan: LayerPlan,
    packing: Packing,
    position_BN: Tensor | None = None,
    counts: RowCounts | None = None,
    fill_BV: Tensor | None = None,
) -> list[Block]:
    """Blocks with the kept entries of a layer.

    Args:
        key_BhNd: rotated keys of the prompt's rows.
        value_BhNd: their values.
        plan: entries that stay, by the rows that they are; one with all S value groups is stored whole.
        packing: layout and precision.
        position_BN: of the rows, in a layer with a window, whose entries keep theirs; None: it has none.
        counts: what ``read_counts`` read of this plan; None: it is read now, the only time that a device is waited for.
        fill_BV: what pieces that are not stored read as, [B, h * d] or [1, h * d] in the values' dtype; stored pieces
            go without it. None: zero.

    Rows of the batch that keep equally many entries, equally many of them whole and with a whole key, share a block.
    """
    _, kv_heads, length, width = key_BhNd.shape
    marks = plan_marks(plan, kv_heads, width, packing.layout)
    counts = read_counts([marks])[0] if counts is None else counts
    keys, values, num_rows = key_BhNd, value_BhNd, len(marks.rows_RM)
    fill = None
    if fill_BV is not None:
        fill = fill_BV.view(-1, kv_heads, 1, width).expand(len(key_BhNd), -1, -1, -1)
    if plan.heads_BNh is not None:
        keys, values = (x.reshape(-1, 1, length, width) for x in (key_BhNd, value_BhNd))
        fill = None if fill is None else fill.reshape(-1, 1, 1, width)
    places_RN = None if position_BN is None else position_BN.int().repeat_interleave(num_rows // len(key_BhNd), 0)
    channels_Rck = _channels(plan, counts.channels)
    alike: dict[tuple[int, ...], list[int]] = {}
    for row, own in enumerate(counts.kinds):
        alike.setdefault(own, []).append(row)
    parted: Sequence[Tensor | None] = [None]
    if len(alike) > 1:
        parted = torch.split(_order(marks), [len(members) for members in alike.values()])
    blocks = []
    for rows, (sizes, members) in zip(parted, alike.items(), strict=True):

        def of_rows(part: Tensor, rows: Tensor | None = rows) -> Tensor:
            return part if rows is None else part[rows]

        own_keys, own_values, own_row = of_rows(keys), of_rows(values), of_rows(marks.rows_RM)
        channels = None if channels_Rck is None else of_rows(channels_Rck)
        parts, routed_kinds = [], iter(counts.bits)
        for kind, size in zip(marks.kinds, sizes, strict=True):
            bits = next(routed_kinds) if kind.routed else []
            if not size and (kind.routed or kind.cut):
                continue
            places = _places(of_rows(kind.marks_RM), size)
            index = own_row.gather(1, places)
            stored = Payload.store(_take(own_keys, index, channels if kind.cut else None), packing.kv_bits)
            value_RcMd = _take(own_values, index)
            stands = None if places_RN is None else of_rows(places_RN).gather(1, index)
            if kind.routed:
                assert marks.flags_RSM is not None
                assert marks.piece_bit is not None
                own_bits = of_rows(marks.flags_RSM)
                flags = own_bits.gather(2, places[:, None].expand(-1, own_bits.shape[1], -1))
                value_RcMd = value_RcMd if fill is None else value_RcMd - of_rows(fill)
                bounds = [0, *accumulate(bits[row][bit] for row in members for bit in marks.bit_of)]
                kept = _routed_values(value_RcMd, flags, marks.piece_bit, stored, packing.kv_bits, bounds)
                parts.append(BlockPart(stored, kept, kind.cut, stands))
            else:
                parts.append(BlockPart(stored, Payload.store(value_RcMd, packing.kv_bits), kind.cut, stands))
        own_channels = channels if any(part.cut for part in parts) else None
        blocks.append(Block(rows, parts, own_channels, numbers=None if rows is None else members))
    return blocks


def _order(marks: PlanMarks) -> Tensor:
    """The rows, int64 [R]: those with equal counts beside each other, where the first of them stands."""
    counts_RK = torch.stack([kind.marks_RM.sum(-1) for kind in marks.kinds], -1)
    same_RR = (counts_RK[:, None] == counts_RK).all(-1)
    return same_RR.int().argmax(-1).sort(stable=True).indices


def _channels(plan: LayerPlan, count: int) -> Tensor | None:
    """Numbers of the ``count`` channels that cut keys keep, [R, c, k]; None where no key is cut."""
    if plan.cut_keys is None:
        return None
    batch, heads, width = plan.cut_keys.channels_Bhd.shape
    found = torch.nonzero_static(plan.cut_keys.channels_Bhd, size=batch * heads * count)[:, 2]
    channels_Bhk = found.view(batch, heads, count).to(torch.uint8 if width <= 256 else torch.int16)
    return channels_Bhk if plan.heads_BNh is None else channels_Bhk.flatten(0, 1)[:, None]


def _places(chosen_RM: Tensor, count: int) -> Tensor:
    """Places of the ``count`` marked entries of each row, ascending, int64 [R, count]."""
    return torch.nonzero_static(chosen_RM, size=len(chosen_RM) * count)[:, 1].view(len(chosen_RM), count)


def _take(vectors_RcNd: Tensor, index_RM: Tensor, channels_Rck: Tensor | None = None) -> Tensor:
    """Entries of every head, [R, c, M, d], or [R, c, M, k] in chosen channels."""
    rows, heads = (torch.arange(size, device=index_RM.device) for size in vectors_RcNd.shape[:2])
    taken = vectors_RcNd[rows[:, None, None], heads[:, None], index_RM[:, None]]  # gather takes twice as long
    if channels_Rck is None:
        return taken
    return taken.gather(3, channels_Rck.long()[:, :, None].expand(-1, -1, index_RM.shape[1], -1))


def _routed_values(
    value_RcMd: Tensor, flags_RSM: Tensor, piece_bit: Tensor, keys: Payload, kv_bits: int, bounds: list[int]
) -> RoutedValues:
    """Keep the pieces that the flags name, piece by piece, and find them by the faster index that is small enough."""
    rows, heads, entries, _ = value_RcMd.shape
    pieces_RPMw = value_RcMd.reshape(rows, heads, entries, len(piece_bit) // heads, -1).transpose(2, 3).flatten(1, 2)
    stored_n3 = torch.nonzero_static(flags_RSM.index_select(1, piece_bit), size=bounds[-1])
    pieces = Payload.store(pieces_RPMw[stored_n3.unbind(1)], kv_bits)
    return with_index(pieces, flags_RSM, piece_bit, keys, bounds)


def with_index(
    pieces: Payload, flags_RSM: Tensor, piece_bit: Tensor, keys: Payload, bounds: list[int] | None = None
) -> RoutedValues:
    """Stored pieces with what finds their entries.

    Args:
        pieces: in the order of ``RoutedValues.pieces``.
        flags_RSM: what each entry stores, bool, by its S bits.
        piece_bit: which of the bits rules each piece.
        keys: of the same entries.
        bounds: of the result; None: they are read from the device.
    """
    flags_RPM, heads = flags_RSM.index_select(1, piece_bit), keys.data.shape[1]
    counts = flags_RPM.sum(-1).flatten()
    stored, offsets = len(pieces.data), (counts.cumsum(0) - counts).int()
    fused = choose_kernel(flags_RSM.device.type).path == "triton"  # reads bits
    if fused or offsets.element_size() * stored > MAX_INDEX * (keys.nbytes + pieces.nbytes):
        index = pack_bits(flags_RSM)
    else:
        index = places_of(flags_RPM, heads, stored).to(torch.int32)
    return RoutedValues(index, pieces, offsets, piece_bit.int(), flags_RSM.shape[-1], heads, bounds or [])
