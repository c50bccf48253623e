"""Packs a layer in one launch, in Triton: entries are found, gathered, cut into pieces, rounded and written.

A program takes a stretch of the entries of one kind that one head of one row stores, and writes their keys and values
where they stay. Everything beside is small: a sort of the marks, a count of the flags, and a table that says where each
(row, kind) writes. Sizes are known on the host, which reads nothing. Served are the model's own dtype and symmetric
integers; all else is packed by ``cache/pack.py``, whose numbers these are.

Legend: B batch, h key-value heads, N rows of the prompt, d head width, R rows of storage, c heads of a row, K kinds, M
entries of the plan, S bits of an entry, P pieces of an entry in all heads of the row, k channels of a cut key; n
entries of a program, p pieces of a head, w channels of a piece.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from subtoken_train.kernels.formats import Format

FIELDS: tl.constexpr = tl.constexpr(10)  # of a row and kind, as ``cache/pack.py`` writes them
COUNT: tl.constexpr = tl.constexpr(0)  # entries that the row stores of the kind
CUT: tl.constexpr = tl.constexpr(1)  # whether their keys are cut
KEYS: tl.constexpr = tl.constexpr(2)  # addresses of the row's own part, as all that follow; 0: there is none
KEY_SCALES: tl.constexpr = tl.constexpr(3)
VALUES: tl.constexpr = tl.constexpr(4)
VALUE_SCALES: tl.constexpr = tl.constexpr(5)
STARTS: tl.constexpr = tl.constexpr(6)  # of the first number of each piece, int32; 0: values are whole
INDEX: tl.constexpr = tl.constexpr(7)
INDEX_BYTES: tl.constexpr = tl.constexpr(8)
POSITIONS: tl.constexpr = tl.constexpr(9)
HALF_EVEN: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2^23: what is added to it is rounded to a whole number
ENTRIES = 16  # of a program: of 32 most shapes take all registers of a thread


@triton.jit
def _rounded(vectors, scales, place, there, BITS: tl.constexpr):
    """Return what is stored of vectors [n, m], and write their scales, as ``Symmetric.store`` rounds."""
    stored = vectors
    if BITS != 0:
        top: tl.constexpr = 127.0 if BITS == 8 else 7.0
        wide = vectors.to(tl.float32)
        largest = tl.max(tl.abs(wide), 1)
        scale = tl.maximum(tl.div_rn(largest, tl.full(largest.shape, top, tl.float32)), 2.0**-24).to(tl.float16)
        tl.store(scales + place, scale, mask=there)
        times = tl.div_rn(wide, tl.broadcast_to(scale.to(tl.float32)[:, None], wide.shape))
        codes = tl.minimum(tl.maximum((times + HALF_EVEN) - HALF_EVEN, -top), top).to(tl.int32)
        if BITS == 8:
            stored = codes.to(tl.int8)
        else:
            low, high = tl.split(tl.reshape(codes + 8, [codes.shape[0], codes.shape[1] // 2, 2]))
            stored = (low | (high << 4)).to(tl.uint8)
    return stored


@triton.jit
def _store_vectors(vectors, data, scales, place, there, width, BITS: tl.constexpr):
    """Store vectors [n, m], 0 beyond ``width``, at places ``place`` [n]."""
    stored = _rounded(vectors, scales, place, there, BITS)
    byte, size = tl.arange(0, stored.shape[1]), width // (2 if BITS == 4 else 1)
    tl.store(data + place[:, None] * size + byte[None, :], stored, mask=there[:, None] & (byte < size)[None, :])


@triton.jit
def _pack_pieces(
    own, starts, flags, counted, piece_bit, fill, from_value, row, head, of_kind, place, stands, there, entries,
    bits, FILLED: tl.constexpr, WIDTH: tl.constexpr, PIECE: tl.constexpr, BITS: tl.constexpr, CODES: tl.constexpr,
    HEADS: tl.constexpr, PIECE_COUNT: tl.constexpr, PIECE_TILE: tl.constexpr,
):  # fmt: skip
    """Write the pieces that entries [n] of one head of a row store; the count of flags before them says where."""
    piece, within = tl.arange(0, PIECE_COUNT), tl.arange(0, PIECE_TILE)
    owned, of_row = piece < WIDTH // PIECE, head * (WIDTH // PIECE) + piece
    bit, both = tl.load(piece_bit + of_row, mask=owned, other=0), there[:, None] & owned[None, :]
    flagged = flags + (row * bits + bit)[None, :] * entries + place[:, None]
    stored = (tl.load(flagged, mask=both, other=0) != 0) & both
    before = counted + (of_kind * bits + bit)[None, :] * entries + place[:, None]
    first = tl.load(starts.to(tl.pointer_type(tl.int32)) + of_row, mask=owned, other=0).to(tl.int64)
    number = first[None, :] + tl.load(before, mask=stored, other=1) - 1
    channel = piece[:, None] * PIECE + within[None, :]
    mask = stored[:, :, None] & (within < PIECE)[None, None, :]
    pieces = tl.load(from_value[:, None, None] + channel[None, :, :], mask=mask, other=0)
    if FILLED:
        real = owned[:, None] & (within < PIECE)[None, :]
        read = tl.load(fill + (row * HEADS + head) * WIDTH + channel, mask=real, other=0)
        less = pieces.to(tl.float32) - read[None, :, :].to(tl.float32)
        pieces = tl.where(mask, less, 0.0).to(pieces.dtype)
    data = tl.load(own + VALUES).to(tl.pointer_type(CODES))
    scales = tl.load(own + VALUE_SCALES).to(tl.pointer_type(tl.float16))
    codes = tl.reshape(pieces, [pieces.shape[0], PIECE_COUNT * PIECE_TILE])  # an entry's head has one scale
    codes = _rounded(codes, scales, stands, there, BITS)
    codes = tl.reshape(codes, [pieces.shape[0], PIECE_COUNT, codes.shape[1] // PIECE_COUNT])
    byte, size = tl.arange(0, codes.shape[2]), PIECE // (2 if BITS == 4 else 1)
    at = data + number[:, :, None] * size + byte[None, None, :]
    tl.store(at, codes, mask=stored[:, :, None] & (byte < size)[None, None, :])


@triton.jit
def _pack_flags(
    index, size, flags, row, first, place, there, entries, bits, BLOCK: tl.constexpr, BIT_TILE: tl.constexpr
):
    """Write the flags of entries [n] from the ``first``, eight a byte, as ``pack_bits`` does."""
    flag, byte = tl.arange(0, BIT_TILE), first // 8 + tl.arange(0, BLOCK // 8)
    flagged = flags + (row * bits + flag)[None, :] * entries + place[:, None]
    held = tl.load(flagged, mask=there[:, None] & (flag < bits)[None, :], other=0).to(tl.int32)
    held = tl.reshape(held << (tl.arange(0, BLOCK) % 8)[:, None], [BLOCK // 8, 8, BIT_TILE])
    real = (flag < bits)[None, :] & (byte < size)[:, None]
    tl.store(index + flag[None, :] * size + byte[:, None], tl.sum(held, 1).to(tl.uint8), mask=real)


@triton.jit(do_not_specialize=["num_rows", "entries", "length"])  # every prompt's differ: none is compiled for
def pack_entries(
    key, key_b, key_h, key_n, value, value_b, value_h, value_n, table, order, rows, flags, counted, piece_bit, channels,
    positions, fill, num_rows, entries, length, bits,
    KINDS: tl.constexpr, HEADS: tl.constexpr, PER_SAMPLE: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
    PIECE: tl.constexpr, BITS: tl.constexpr, CODES: tl.constexpr, ROUTED: tl.constexpr, FILLED: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, PIECE_COUNT: tl.constexpr, PIECE_TILE: tl.constexpr,
    BIT_TILE: tl.constexpr,
):  # fmt: skip
    """Write a stretch of what one head of one row stores of one kind; axes of the grid: row and head, stretch, kind."""
    row, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    kind, first = tl.program_id(2), tl.program_id(1) * BLOCK
    own = table + (row * KINDS + kind) * FIELDS
    count = tl.load(own + COUNT).to(tl.int32)
    if first < count:
        entry, column = first + tl.arange(0, BLOCK), tl.arange(0, TILE)
        there, of_kind = entry < count, kind * num_rows + row
        place = tl.load(order + of_kind * entries + entry, mask=there, other=0)
        source = tl.load(rows + row * entries + place, mask=there, other=0)
        sample, of_sample = row // PER_SAMPLE, row % PER_SAMPLE + head
        stands = (head * count + entry).to(tl.int64)
        width, channel = WIDTH, column
        if CHANNELS:
            cut = tl.load(own + CUT) != 0
            listed = channels + (row * HEADS + head) * CHANNELS + column
            channel = tl.where(cut, tl.load(listed, mask=cut & (column < CHANNELS), other=0).to(tl.int32), column)
            width = tl.where(cut, CHANNELS, WIDTH)
        from_key = key + sample * key_b + of_sample * key_h + source * key_n
        mask = there[:, None] & (column < width)[None, :]
        vectors = tl.load(from_key[:, None] + channel[None, :], mask=mask, other=0)
        data = tl.load(own + KEYS).to(tl.pointer_type(CODES))
        scales = tl.load(own + KEY_SCALES).to(tl.pointer_type(tl.float16))
        _store_vectors(vectors, data, scales, stands, there, width, BITS)
        from_value = value + sample * value_b + of_sample * value_h + source * value_n
        starts, index, into = tl.load(own + STARTS), tl.load(own + INDEX), tl.load(own + POSITIONS)
        if starts == 0:
            mask = there[:, None] & (column < WIDTH)[None, :]
            vectors = tl.load(from_value[:, None] + column[None, :], mask=mask, other=0)
            data = tl.load(own + VALUES).to(tl.pointer_type(CODES))
            scales = tl.load(own + VALUE_SCALES).to(tl.pointer_type(tl.float16))
            _store_vectors(vectors, data, scales, stands, there, WIDTH, BITS)
        elif ROUTED:
            _pack_pieces(
                own, starts, flags, counted, piece_bit, fill, from_value, row, head, of_kind, place, stands,
                there, entries, bits, FILLED, WIDTH, PIECE, BITS, CODES, HEADS, PIECE_COUNT, PIECE_TILE,
            )  # fmt: skip
        if (head == 0) & (index != 0):
            size, at = tl.load(own + INDEX_BYTES).to(tl.int32), index.to(tl.pointer_type(tl.uint8))
            _pack_flags(at, size, flags, row, first, place, there, entries, bits, BLOCK, BIT_TILE)
        if (head == 0) & (into != 0):
            found = tl.load(positions + sample * length + source, mask=there, other=0)
            tl.store(into.to(tl.pointer_type(tl.int32)) + entry, found, mask=there)


def launch_packing(
    states: tuple[Tensor, Tensor],
    form: Format,
    table: Tensor,
    marks_KRM: Tensor,
    rows_RM: Tensor,
    flags_RSM: Tensor | None,
    beside: tuple[Tensor | None, ...],
    pieces: int,
    routed: int,
    most: int,
) -> None:
    """Write a layer's entries where the table says; the first ``routed`` kinds store ``pieces`` of a head.

    ``beside``: bits of pieces, int32 [P]; numbers of channels, [R, c, k]; positions, int32 [B, N]; fill, [R, c, 1, d].
    ``most``: entries of a kind that a row stores at most.
    """
    (batch, kv_heads, length, width), (kinds, rows, entries) = states[0].shape, marks_KRM.shape
    key, value = (each if each.stride(-1) == 1 else each.contiguous() for each in states)
    order = marks_KRM.int().sort(dim=-1, descending=True, stable=True).indices
    flags, counted, bits = table, table, 0  # stand where nothing is read
    if flags_RSM is not None and routed:
        flags, bits = flags_RSM.contiguous(), flags_RSM.shape[1]
        counted = (flags & marks_KRM[:routed, :, None]).cumsum(-1, dtype=torch.int32)
    _, channels, _, fill = beside
    heads = batch * kv_heads // rows
    with torch.cuda.device(key.device) if key.is_cuda else nullcontext():  # where Triton launches
        pack_entries[(rows * heads, -(-most // ENTRIES), kinds)](
            key, *key.stride()[:3], value, *value.stride()[:3], table, order, rows_RM.contiguous(), flags, counted,
            *(table if each is None else each.contiguous() for each in beside), rows, entries, length, bits,
            KINDS=kinds, HEADS=heads, PER_SAMPLE=kv_heads // heads, WIDTH=width, PIECE=width // pieces, BITS=form.bits,
            CHANNELS=0 if channels is None else channels.shape[-1], ROUTED=routed > 0, FILLED=fill is not None,
            CODES=getattr(tl, str(form.code_dtype(key.dtype)).removeprefix("torch.")),
            **pack_tiles(width, pieces, bits),
        )  # fmt: skip


def pack_tiles(width: int, pieces: int, bits: int) -> dict[str, int]:
    """Return the sizes of a program's tiles, powers of 2."""
    return {
        "BLOCK": ENTRIES, "TILE": max(2, next_power_of_2(width)), "PIECE_COUNT": next_power_of_2(pieces),
        "PIECE_TILE": max(2, next_power_of_2(width // pieces)), "BIT_TILE": next_power_of_2(max(1, bits)),
    }  # fmt: skip
