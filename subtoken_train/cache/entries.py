"""Entries of packed blocks: read a layer's in full, and keep some of them together with some of a tail.

What was stored stays as it was stored: of rounded vectors and of pieces some are *selected*, none is rounded again. A
tail's entries become whole entries. A row's stored entries are counted part after part: their *order of storage*.

Legend: R rows (all of the cache, or of a block), c heads of a row, M stored entries, T tail tokens, N = M + T, d head
width, P pieces of an entry, S bits of an entry, n stored pieces.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from subtoken_train.cache.by_sample import select_part
from subtoken_train.cache.pack import with_index
from subtoken_train.kernels.storage import Block, BlockPart, Payload, RoutedValues


def read_keys(blocks: list[Block], rows: int) -> Tensor:
    """Keys of all rows in the order of storage, [R, c, M, d]; rows with fewer than the most end in zeros."""
    return _read(blocks, rows, lambda part: part.keys.read())


def read_values(blocks: list[Block], rows: int) -> Tensor:
    """Their values, 0 where a piece is not stored."""
    return _read(blocks, rows, _values)


def _read(blocks: list[Block], rows: int, of_part: Callable[[BlockPart], Tensor]) -> Tensor:
    most = max(sum(part.entries for part in block.parts) for block in blocks)
    like = of_part(blocks[0].parts[0])
    dense = like.new_zeros(rows, blocks[0].heads, most, like.shape[-1])
    for block in blocks:
        read = torch.cat([of_part(part) for part in block.parts], 2)
        dense[slice(None) if block.rows is None else block.rows, :, : read.shape[2]] = read
    return dense


def _values(part: BlockPart) -> Tensor:
    values = part.values
    if isinstance(values, Payload):
        return values.read()
    flags_RPM, pieces = _flags(values), values.pieces.read()
    dense = pieces.new_zeros(*flags_RPM.shape, pieces.shape[-1])
    dense[flags_RPM] = pieces
    by_head = dense.view(len(dense), values.heads, -1, values.entries, pieces.shape[-1])
    return by_head.transpose(2, 3).flatten(3)


def _flags(values: RoutedValues) -> Tensor:
    """Which pieces each entry stores, bool [R, P, M]."""
    bounds = torch.tensor(values.bounds, device=values.offsets.device)
    bag_n = torch.arange(len(values.offsets), device=bounds.device).repeat_interleave(bounds.diff())
    flags = torch.zeros(len(values.offsets), values.entries, dtype=torch.bool, device=bounds.device)
    flags[bag_n, values.places().long() % values.entries] = True
    return flags.view(-1, len(values.piece_bit), values.entries)


def keep_entries(blocks: list[Block], keep_RN: Tensor, tail: BlockPart, settles_R: Tensor, bits: int) -> list[Block]:
    """Blocks of the marked entries of a layer and its tail.

    Args:
        blocks: of the layer.
        keep_RN: entries that stay, bool: the stored ones in their order, to the longest row, then the tail's. They come
            to lie in the same order.
        tail: by row, in the model's dtype.
        settles_R: rows whose tail is stored with ``bits``; that of the others stays in the model's dtype meanwhile,
            bool. Without rounding they are alike.
        bits: precision, see ``Payload.store``.
    """
    stored = keep_RN.shape[1] - tail.entries
    groups: dict[tuple[int, ...], list[tuple[Tensor, list[BlockPart]]]] = {}
    for block in blocks:
        rows_R = torch.arange(len(keep_RN), device=keep_RN.device) if block.rows is None else block.rows
        tail_part = BlockPart(tail.keys.select(rows_R), _payload(tail).select(rows_R))
        sizes = [part.entries for part in block.parts]
        marks = [*keep_RN[rows_R, : sum(sizes)].split_with_sizes(sizes, 1), keep_RN[rows_R, stored:]]
        held = list(zip([*block.parts, tail_part], marks, strict=True))
        counts_RK = torch.stack([mark.sum(-1) for mark in marks] + [settles_R[rows_R].long()], -1).tolist()
        for alike in dict.fromkeys(map(tuple, counts_RK)):
            own_R = torch.tensor([i for i, each in enumerate(counts_RK) if tuple(each) == alike], device=rows_R.device)
            chosen = [_select(part, own_R, mark) for part, mark in held]
            parts = _as_kinds(chosen, bool(alike[-1]), bits)
            key = tuple(part.entries * (-1) ** isinstance(part.values, RoutedValues) for part in parts)
            groups.setdefault(key, []).append((rows_R[own_R], parts))
    return [_block(members, len(keep_RN)) for members in groups.values()]


def _as_kinds(parts: list[BlockPart], settles: bool, bits: int) -> list[BlockPart]:
    """What is routed, what is whole, and what is not rounded yet; only the second may be empty."""
    routed = [part for part in parts if isinstance(part.values, RoutedValues)]
    whole = [part for part in parts[len(routed) :] if not _is_fresh(part, bits)]
    fresh = [part for part in parts[len(routed) :] if _is_fresh(part, bits)]
    assert parts == [*routed, *whole, *fresh]
    if settles or not bits:
        settled = [BlockPart(*(Payload.store(x.read(), bits) for x in part.payloads)) for part in fresh]
        whole, fresh = whole + settled, []
    kinds = [*routed, _joined(whole), *([_joined(fresh)] if fresh else [])]
    return [part for i, part in enumerate(kinds) if part.entries or i == len(routed)]


def _is_fresh(part: BlockPart, bits: int) -> bool:
    """Whether it is to be rounded still; without rounding, nothing is."""
    return bool(bits) and part.keys.scale is None


def _select(part: BlockPart, rows: Tensor, mark_RM: Tensor) -> BlockPart:
    """The marked entries of some rows, as many of each."""
    if len(rows) < len(mark_RM):
        part, mark_RM = select_part(part, rows), mark_RM[rows]
    index_RM = mark_RM.nonzero()[:, 1].view(len(rows), -1)
    keys, values = _take(part.keys, index_RM), part.values
    if isinstance(values, Payload):
        return BlockPart(keys, _take(values, index_RM))
    flags_RPM = _flags(values)
    stays_n = mark_RM[:, None].expand_as(flags_RPM)[flags_RPM]
    kept_RPM = flags_RPM.gather(2, index_RM[:, None].expand(-1, flags_RPM.shape[1], -1))
    return BlockPart(keys, _found(values.pieces.select(stays_n), kept_RPM, values.piece_bit, keys))


def _found(pieces: Payload, flags_RPM: Tensor, piece_bit: Tensor, keys: Payload) -> RoutedValues:
    """``with_index`` from the flags of every piece: a bit is that of the first piece which it rules."""
    ruled = (piece_bit == torch.arange(int(piece_bit.max()) + 1, device=piece_bit.device)[:, None]).int()
    return with_index(pieces, flags_RPM.index_select(1, ruled.argmax(1)), piece_bit, keys)


def _take(payload: Payload, index_RM: Tensor) -> Payload:
    """Entries of every head of rows."""

    def taken(vectors: Tensor) -> Tensor:
        return vectors.gather(2, index_RM[:, None, :, None].expand(-1, vectors.shape[1], -1, vectors.shape[-1]))

    return Payload(taken(payload.data), None if payload.scale is None else taken(payload.scale), payload.dtype)


def _joined(parts: list[BlockPart], axis: int = 2) -> BlockPart:
    """Entries (axis 2) or rows (axis 0) of all parts, which are of one kind."""
    if len(parts) == 1:
        return parts[0]
    keys = _concatenated([part.keys for part in parts], axis)
    values = [part.values for part in parts if isinstance(part.values, RoutedValues)]
    if not values:
        return BlockPart(keys, _concatenated([_payload(part) for part in parts], axis))
    flags_RPM = torch.cat([_flags(each) for each in values])
    return BlockPart(keys, _found(_concatenated([x.pieces for x in values], 0), flags_RPM, values[0].piece_bit, keys))


def _concatenated(payloads: list[Payload], axis: int) -> Payload:
    scales = [payload.scale for payload in payloads if payload.scale is not None]
    dtype = payloads[0].dtype
    data = [payload.data if payload.scale is not None else payload.data.to(dtype) for payload in payloads]
    return Payload(torch.cat(data, axis), torch.cat(scales, axis) if scales else None, dtype)


def _payload(part: BlockPart) -> Payload:
    assert isinstance(part.values, Payload)
    return part.values


def _block(members: list[tuple[Tensor, list[BlockPart]]], count: int) -> Block:
    """One block of all members' rows, ascending."""
    parts = [_joined(list(of_kind), 0) for of_kind in zip(*(parts for _, parts in members), strict=True)]
    rows = torch.cat([rows for rows, _ in members])
    if len(members) > 1:
        order = rows.argsort()
        rows, parts = rows[order], [select_part(part, order) for part in parts]
    return Block(None if len(rows) == count else rows, parts)
