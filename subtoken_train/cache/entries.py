"""Entries of packed blocks: read a layer's in full, and keep some of them together with some of a tail.

What was stored stays as it was stored: of rounded vectors and of pieces some are *selected*, none is rounded again. A
tail's entries become whole entries. A row's stored entries are counted part after part: their *order of storage*.

Legend: R rows (all of the cache, or of a block), c heads of a row, M stored entries, T tail tokens, N = M + T, d head
width, P pieces of an entry, S bits of an entry, n stored pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from subtoken_train.cache.by_sample import select_part
from subtoken_train.cache.pack import with_index
from subtoken_train.kernels.dense import dense_keys, dense_values, stored_flags
from subtoken_train.kernels.fill import Fill
from subtoken_train.kernels.storage import Block, BlockPart, Payload, RoutedValues


def read_keys(blocks: list[Block], rows: int) -> Tensor:
    """Keys of all rows in the order of storage, [R, c, M, d]; 0 in cut channels, and after a row's last entry."""
    return _dense(blocks, rows, dense_keys)


def read_values(blocks: list[Block], rows: int, fill: Fill | None = None) -> Tensor:
    """Their values, ``fill`` (or 0) where a piece is not stored."""

    def read(part: BlockPart, block: Block, width: int) -> Tensor:
        values = dense_values(part)
        if fill is None or isinstance(part.values, Payload):
            return values
        own = fill.of_rows(block.heads, values.dtype)
        return values + (own if block.rows is None else own[block.rows])

    return _dense(blocks, rows, read)


def _dense(blocks: list[Block], rows: int, read: Callable[[BlockPart, Block, int], Tensor]) -> Tensor:
    most = max(sum(part.entries for part in block.parts) for block in blocks)
    like = _payload(blocks[0].parts[-1]).read()  # entries stored whole are the last
    dense = like.new_zeros(rows, blocks[0].heads, most, like.shape[-1], dtype=blocks[0].parts[-1].keys.dtype)
    for block in blocks:
        held = torch.cat([read(part, block, dense.shape[-1]).to(dense.dtype) for part in block.parts], 2)
        dense[slice(None) if block.rows is None else block.rows, :, : held.shape[2]] = held
    return dense


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
    groups: dict[tuple[tuple[int, int], ...], list[_Rows]] = {}
    for block in blocks:
        rows_R = torch.arange(len(keep_RN), device=keep_RN.device) if block.rows is None else block.rows
        sizes = [part.entries for part in block.parts]
        marks = [*keep_RN[rows_R, : sum(sizes)].split_with_sizes(sizes, 1), keep_RN[rows_R, stored:]]
        held = list(zip([*block.parts, select_part(tail, rows_R)], marks, strict=True))
        counts_RK = torch.stack([mark.sum(-1) for mark in marks] + [settles_R[rows_R].long()], -1).tolist()
        for alike in dict.fromkeys(map(tuple, counts_RK)):
            own_R = torch.tensor([i for i, each in enumerate(counts_RK) if tuple(each) == alike], device=rows_R.device)
            kinds = _by_kind([_select(part, own_R, mark) for part, mark in held], bool(alike[-1]), bits)
            key = tuple((kind, part.entries) for kind, part in kinds.items())
            channels = None if block.channels is None else block.channels[own_R]
            groups.setdefault(key, []).append(_Rows(rows_R[own_R], list(kinds.values()), channels))
    return [_block(members, len(keep_RN)) for members in groups.values()]


@dataclass
class _Rows:
    """Rows of the cache that have equally many entries of each kind, and these; ``channels`` as in ``Block``."""

    rows: Tensor
    parts: list[BlockPart]
    channels: Tensor | None


WHOLE, FRESH = 3, 4


def _by_kind(parts: list[BlockPart], settles: bool, bits: int) -> dict[int, BlockPart]:
    """Parts in the order of storage, one of each kind, as ``pack_layer`` orders them, then what is not rounded yet.

    Only ``WHOLE`` may be empty, and is always there.
    """
    kinds: dict[int, list[BlockPart]] = {}
    for part in parts:
        kind, own = 2 * isinstance(part.values, Payload) + (not part.cut), part
        if kind == WHOLE and bits and part.keys.scale is None:
            kind = FRESH
            if settles:
                kind, own = (
                    WHOLE,
                    BlockPart(Payload.store(part.keys.read(), bits), Payload.store(_payload(part).read(), bits)),
                )
        kinds.setdefault(kind, []).append(own)
    joined = {kind: _joined(kinds[kind]) for kind in sorted(kinds)}
    return {kind: part for kind, part in joined.items() if part.entries or kind == WHOLE}


def _select(part: BlockPart, rows: Tensor, mark_RM: Tensor) -> BlockPart:
    """The marked entries of some rows, as many of each."""
    if len(rows) < len(mark_RM):
        part, mark_RM = select_part(part, rows), mark_RM[rows]
    index_RM = mark_RM.nonzero()[:, 1].view(len(rows), -1)
    keys, values = _take(part.keys, index_RM), part.values
    if isinstance(values, Payload):
        return BlockPart(keys, _take(values, index_RM), part.cut)
    flags_RPM = stored_flags(values)
    stays_n = mark_RM[:, None].expand_as(flags_RPM)[flags_RPM]
    kept_RPM = flags_RPM.gather(2, index_RM[:, None].expand(-1, flags_RPM.shape[1], -1))
    return BlockPart(keys, _found(values.pieces.select(stays_n), kept_RPM, values.piece_bit, keys), part.cut)


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
        return BlockPart(keys, _concatenated([_payload(part) for part in parts], axis), parts[0].cut)
    flags_RPM, pieces = torch.cat([stored_flags(each) for each in values]), _concatenated([x.pieces for x in values], 0)
    return BlockPart(keys, _found(pieces, flags_RPM, values[0].piece_bit, keys), parts[0].cut)


def _concatenated(payloads: list[Payload], axis: int) -> Payload:
    scales = [payload.scale for payload in payloads if payload.scale is not None]
    dtype = payloads[0].dtype
    data = [payload.data if payload.scale is not None else payload.data.to(dtype) for payload in payloads]
    return Payload(torch.cat(data, axis), torch.cat(scales, axis) if scales else None, dtype)


def _payload(part: BlockPart) -> Payload:
    assert isinstance(part.values, Payload)
    return part.values


def _block(members: list[_Rows], count: int) -> Block:
    """One block of all members' rows, ascending."""
    parts = [_joined(list(of_kind), 0) for of_kind in zip(*(each.parts for each in members), strict=True)]
    rows = torch.cat([each.rows for each in members])
    channels = None
    if any(part.cut for part in parts):
        channels = torch.cat([each.channels for each in members if each.channels is not None])
    if len(members) > 1:
        order = rows.argsort()
        rows, parts = rows[order], [select_part(part, order) for part in parts]
        channels = None if channels is None else channels[order]
    return Block(None if len(rows) == count else rows, parts, channels)
