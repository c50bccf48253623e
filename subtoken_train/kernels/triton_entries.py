"""Loops of the fused kernels over a stretch: of routed entries, of entries stored whole, of the tail.

Triton; every function runs inside a kernel. Routed and whole entries have loops of their own, because one that branches
for every tile takes the registers of both.
"""

from __future__ import annotations

import triton
import triton.language as tl

from subtoken_train.kernels.row_fields import Field
from subtoken_train.kernels.triton_tiles import (
    load_pieces,
    load_queries,
    load_vectors,
    running_softmax,
    stored_scores,
    value_channels,
)

FLAGS: tl.constexpr = tl.constexpr(int(Field.FLAGS))
FLAG_BYTES: tl.constexpr = tl.constexpr(int(Field.FLAG_BYTES))
PIECE_BIT: tl.constexpr = tl.constexpr(int(Field.PIECE_BIT))
STARTS: tl.constexpr = tl.constexpr(int(Field.STARTS))
STRETCHES: tl.constexpr = tl.constexpr(int(Field.STRETCHES))
FILL: tl.constexpr = tl.constexpr(int(Field.FILL))
FILL_STEP: tl.constexpr = tl.constexpr(int(Field.FILL_STEP))


@triton.jit
def routed_entries(
    asked, keys, key_scales, values, value_scales, row, item, of_row, before, first, stop, positions, own_r, window,
    scale, channel_k, stored_k, key_width, peak, total, sums,
    WIDTH: tl.constexpr, PIECE: tl.constexpr, BITS: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
    PIECE_COUNT: tl.constexpr, PIECE_TILE: tl.constexpr,
):  # fmt: skip
    """Entries ``first`` to ``stop`` of a row whose values are stored in part: (maximum, total, sums) with theirs."""
    dtype = asked.dtype
    flag_bytes = tl.load(row + FLAG_BYTES)
    flags = tl.load(row + FLAGS).to(tl.pointer_type(tl.uint8))
    piece_p, within_w = tl.arange(0, PIECE_COUNT), tl.arange(0, PIECE_TILE)
    owned_p, numbered_p = piece_p < WIDTH // PIECE, of_row * (WIDTH // PIECE) + piece_p
    bit_p = tl.load(tl.load(row + PIECE_BIT).to(tl.pointer_type(tl.int32)) + numbered_p, mask=owned_p, other=0)
    starts = tl.load(row + STARTS).to(tl.pointer_type(tl.int32)) + tl.load(item + 2)
    next_p = tl.load(starts + numbered_p * tl.load(row + STRETCHES), mask=owned_p, other=0)
    for start in range(first, stop, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        inside = entry < stop
        scores, seen = stored_scores(
            asked, keys, key_scales, before + entry, inside, channel_k, stored_k, key_width, positions, entry, own_r,
            window, scale, BITS, WINDOW,
        )  # fmt: skip
        weights, peak, total, sums = running_softmax(scores, seen, peak, total, sums)
        byte = flags + bit_p[None, :] * flag_bytes + (entry // 8)[:, None]
        bits = tl.load(byte, mask=inside[:, None] & owned_p[None, :], other=0).to(tl.int32)
        stored = (bits >> (entry % 8)[:, None]) & 1
        number = next_p[None, :] + tl.cumsum(stored, 0) - stored
        next_p += tl.sum(stored, 0)
        value = load_pieces(values, value_scales, number, stored, within_w, PIECE, BITS, dtype)
        value = tl.reshape(value, [BLOCK, PIECE_COUNT * PIECE_TILE])
        sums += tl.dot(weights.to(dtype), value, input_precision="ieee")
    return peak, total, sums


@triton.jit
def filled_sums(
    row, of_row, total, sums,
    FILL_DTYPE: tl.constexpr, WIDTH: tl.constexpr, PIECE: tl.constexpr, PIECE_COUNT: tl.constexpr,
    PIECE_TILE: tl.constexpr,
):  # fmt: skip
    """The sums of a stretch of routed entries with what pieces that are not stored read as: once, by their total."""
    channel_v, real_v = value_channels(WIDTH, PIECE, PIECE_COUNT, PIECE_TILE)
    fill = (tl.load(row + FILL) + of_row * tl.load(row + FILL_STEP)).to(tl.pointer_type(FILL_DTYPE))
    fill_v = tl.load(fill + channel_v, mask=real_v, other=0).to(tl.float32)
    return sums + total[:, None] * fill_v[None, :]


@triton.jit
def whole_entries(
    asked, keys, key_scales, values, value_scales, before, first, stop, positions, own_r, window, scale, channel_k,
    stored_k, key_width, peak, total, sums,
    WIDTH: tl.constexpr, PIECE: tl.constexpr, BITS: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
    PIECE_COUNT: tl.constexpr, PIECE_TILE: tl.constexpr,
):  # fmt: skip
    """The same of entries that are stored whole."""
    dtype = asked.dtype
    channel_v, real_v = value_channels(WIDTH, PIECE, PIECE_COUNT, PIECE_TILE)
    for start in range(first, stop, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        inside = entry < stop
        scores, seen = stored_scores(
            asked, keys, key_scales, before + entry, inside, channel_k, stored_k, key_width, positions, entry, own_r,
            window, scale, BITS, WINDOW,
        )  # fmt: skip
        weights, peak, total, sums = running_softmax(scores, seen, peak, total, sums)
        value = load_vectors(values, value_scales, before + entry, inside, channel_v, real_v, WIDTH, BITS, dtype)
        sums += tl.dot(weights.to(dtype), value, input_precision="ieee")
    return peak, total, sums


@triton.jit
def tail_entries(
    late, query, query_b, query_h, query_q, row_r, own_r, tail_keys, tail_values, tail_b, tail_h, tail_t,
    tail_start, count, window, slots, tail_stretches, scale, new, peak, total, sums,
    TAIL_STRETCH: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
    PIECE: tl.constexpr, PADDED: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, KEY_TILE: tl.constexpr,
    PIECE_COUNT: tl.constexpr, PIECE_TILE: tl.constexpr,
):  # fmt: skip
    """A stretch of the tail: (slot, maximum, total, sums). The tail is causal; a padded place sees itself."""
    dtype = query.dtype.element_ty
    channel_k = tl.arange(0, KEY_TILE)
    channel_v, real_v = value_channels(WIDTH, PIECE, PIECE_COUNT, PIECE_TILE)
    owner, first = late // tail_stretches, late % tail_stretches * TAIL_STRETCH
    sample, head = (owner // KV_HEADS).to(tl.int64), (owner % KV_HEADS).to(tl.int64)
    real_k = channel_k < WIDTH
    asked = load_queries(query, query_b, query_h, query_q, sample, head, row_r, channel_k, real_k, new, GROUP)
    of_head, own = sample * tail_b + head * tail_h, own_r[:, None]
    stop = tl.minimum(first + TAIL_STRETCH, count)
    for start in range(first, stop, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < stop
        of_place = of_head + place.to(tl.int64)[:, None] * tail_t
        there = inside[:, None] & real_k[None, :]
        key = tl.load(tail_keys + of_place + channel_k[None, :], mask=there, other=0).to(dtype)
        scores = tl.dot(asked, tl.trans(key), input_precision="ieee") * scale
        seen = inside[None, :] & (place[None, :] <= own)
        if PADDED:
            seen = (seen & (place[None, :] >= tl.load(tail_start + sample))) | (place[None, :] == own)
        if WINDOW:
            seen = seen & (own - place[None, :] < window)
        weights, peak, total, sums = running_softmax(scores, seen, peak, total, sums)
        valued = inside[:, None] & real_v[None, :]
        value = tl.load(tail_values + of_place + channel_v[None, :], mask=valued, other=0).to(dtype)
        sums += tl.dot(weights.to(dtype), value, input_precision="ieee")
    return (slots + late).to(tl.int64), peak, total, sums
