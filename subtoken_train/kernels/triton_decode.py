"""Fused decoding on packed storage, in Triton: scores, softmax and values of a stretch of entries in one pass.

Flash-decoding (Dao et al., 2023): every program takes one stretch of one head and leaves unnormalised sums with their
maximum; a second kernel joins a head's stretches. Of routed entries a program reads whole keys and stored pieces only:
an entry's flags say which pieces it has, and a running count of the flags before it where they lie (each piece of a row
is a sorted list). Products and sums are in fp32, of operands in the queries' dtype. Two launches for up to 16 tokens.

Not done: pages that a step chooses, heads of more than 256 channels, entries of unlike precision in one layer
(``row_table.unserved``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from subtoken_train.kernels.row_table import Field
from subtoken_train.kernels.triton_loads import load_pieces, load_vectors

FIELDS: tl.constexpr = tl.constexpr(len(Field))
KEYS: tl.constexpr = tl.constexpr(int(Field.KEYS))
KEY_SCALES: tl.constexpr = tl.constexpr(int(Field.KEY_SCALES))
KEY_WIDTH: tl.constexpr = tl.constexpr(int(Field.KEY_WIDTH))
CHANNELS: tl.constexpr = tl.constexpr(int(Field.CHANNELS))
VALUES: tl.constexpr = tl.constexpr(int(Field.VALUES))
VALUE_SCALES: tl.constexpr = tl.constexpr(int(Field.VALUE_SCALES))
FLAGS: tl.constexpr = tl.constexpr(int(Field.FLAGS))
FLAG_BYTES: tl.constexpr = tl.constexpr(int(Field.FLAG_BYTES))
PIECE_BIT: tl.constexpr = tl.constexpr(int(Field.PIECE_BIT))
STARTS: tl.constexpr = tl.constexpr(int(Field.STARTS))
STRETCHES: tl.constexpr = tl.constexpr(int(Field.STRETCHES))
POSITIONS: tl.constexpr = tl.constexpr(int(Field.POSITIONS))
ENTRIES: tl.constexpr = tl.constexpr(int(Field.ENTRIES))
SAMPLE: tl.constexpr = tl.constexpr(int(Field.SAMPLE))
HEAD: tl.constexpr = tl.constexpr(int(Field.HEAD))
SLOTS: tl.constexpr = tl.constexpr(int(Field.SLOTS))


@triton.jit
def _softmax(scores, seen, peak, total, sums):
    """Weights of one more tile, and the running maximum, total and sums brought to its scale (base 2)."""
    scores = tl.where(seen, scores, float("-inf"))
    highest = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(highest == float("-inf"), 0.0, highest)  # nothing seen so far: no NaN
    weights, shrink = tl.exp2(scores - base[:, None]), tl.exp2(peak - base)
    return weights, highest, total * shrink + tl.sum(weights, 1), sums * shrink[:, None]


@triton.jit
def _scores(
    asked, keys, scales, vector, inside, channel, stored, width, positions, entry, own, window, scale,
    BITS: tl.constexpr, WINDOW: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Scores [r, n] of one tile of stored keys, and which of its entries each query row sees, [r, n] or [1, n]."""
    key = load_vectors(keys, scales, vector, inside, channel, stored, width, BITS, DTYPE)
    scores = tl.dot(asked, tl.trans(key), input_precision="ieee") * scale
    seen = inside[None, :]
    if WINDOW:
        stands = tl.load(positions + entry, mask=inside, other=0)
        seen = seen & (own[:, None] - stands[None, :] < window)
    return scores, seen


@triton.jit
def _value_channels(WIDTH: tl.constexpr, PIECE: tl.constexpr, PIECE_COUNT: tl.constexpr, PIECE_TILE: tl.constexpr):
    """Value channels in the order of a tile's columns, piece by piece, and which columns are any."""
    column = tl.arange(0, PIECE_COUNT * PIECE_TILE)
    channel = column // PIECE_TILE * PIECE + column % PIECE_TILE
    return channel, (column % PIECE_TILE < PIECE) & (channel < WIDTH)


@triton.jit
def _packed(
    program, query, query_b, query_h, query_q, row_r, token_r, own_r, rows, items, first_position, window, scale,
    peak, total, sums,
    STRETCH: tl.constexpr, ROW_HEADS: tl.constexpr, GROUP: tl.constexpr, NEW: tl.constexpr, WIDTH: tl.constexpr,
    PIECE: tl.constexpr, BITS: tl.constexpr, KEY_DTYPE: tl.constexpr, VALUE_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr, CUT: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, KEY_TILE: tl.constexpr,
    PIECE_COUNT: tl.constexpr, PIECE_TILE: tl.constexpr,
):  # fmt: skip
    """A stretch of packed entries: (slot, maximum, total, sums) of the tile's query rows."""
    dtype = query.dtype.element_ty
    channel_k = tl.arange(0, KEY_TILE)
    item, of_row = items + program // ROW_HEADS * 4, program % ROW_HEADS
    row, first = rows + tl.load(item).to(tl.int64) * FIELDS, tl.load(item + 1)
    entries, sample = tl.load(row + ENTRIES).to(tl.int32), tl.load(row + SAMPLE)
    slot = tl.load(item + 3) + of_row * tl.load(row + SLOTS)
    keys = tl.multiple_of(tl.load(row + KEYS).to(tl.pointer_type(KEY_DTYPE)), ALIGNED)
    values = tl.multiple_of(tl.load(row + VALUES).to(tl.pointer_type(VALUE_DTYPE)), ALIGNED)
    key_scales = tl.load(row + KEY_SCALES).to(tl.pointer_type(tl.float16))
    value_scales = tl.load(row + VALUE_SCALES).to(tl.pointer_type(tl.float16))
    positions = tl.load(row + POSITIONS).to(tl.pointer_type(tl.int32))
    source_k = channel_k
    if CUT:
        key_width = tl.load(row + KEY_WIDTH).to(tl.int32)
        channels = tl.load(row + CHANNELS)
        if channels != 0:
            places = channels.to(tl.pointer_type(tl.uint8)) + of_row * key_width
            source_k = tl.load(places + channel_k, mask=channel_k < key_width, other=0).to(tl.int32)
    else:
        key_width: tl.constexpr = WIDTH
    stored_k = channel_k < key_width
    heads_r = (tl.load(row + HEAD) + of_row) * GROUP + row_r // NEW
    query_r = query + sample * query_b + heads_r * query_h + token_r * query_q
    mask = (row_r < GROUP * NEW)[:, None] & stored_k[None, :]
    asked = tl.load(query_r[:, None] + source_k[None, :], mask=mask, other=0)
    if WINDOW:
        own_r += tl.load(first_position + sample).to(tl.int32)
    before = of_row.to(tl.int64) * entries  # vectors of the row's heads before this one
    stop = tl.minimum(first + STRETCH, entries)
    flags = tl.load(row + FLAGS)
    if flags != 0:
        flag_bytes, flags_of = tl.load(row + FLAG_BYTES), flags.to(tl.pointer_type(tl.uint8))
        piece_p, within_w = tl.arange(0, PIECE_COUNT), tl.arange(0, PIECE_TILE)
        owned_p, numbered_p = piece_p < WIDTH // PIECE, of_row * (WIDTH // PIECE) + piece_p
        bit_p = tl.load(tl.load(row + PIECE_BIT).to(tl.pointer_type(tl.int32)) + numbered_p, mask=owned_p, other=0)
        starts = tl.load(row + STARTS).to(tl.pointer_type(tl.int32)) + tl.load(item + 2)
        next_p = tl.load(starts + numbered_p * tl.load(row + STRETCHES), mask=owned_p, other=0)
        for start in range(first, stop, BLOCK):
            entry = start + tl.arange(0, BLOCK)
            inside = entry < stop
            scores, seen = _scores(
                asked, keys, key_scales, before + entry, inside, channel_k, stored_k, key_width, positions, entry,
                own_r, window, scale, BITS, WINDOW, dtype,
            )  # fmt: skip
            weights, peak, total, sums = _softmax(scores, seen, peak, total, sums)
            byte = flags_of + bit_p[None, :] * flag_bytes + (entry // 8)[:, None]
            bits = tl.load(byte, mask=inside[:, None] & owned_p[None, :], other=0).to(tl.int32)
            stored = (bits >> (entry % 8)[:, None]) & 1
            number = next_p[None, :] + tl.cumsum(stored, 0) - stored
            next_p += tl.sum(stored, 0)
            value = load_pieces(values, value_scales, number, stored, within_w, PIECE, BITS, dtype)
            value = tl.reshape(value, [BLOCK, PIECE_COUNT * PIECE_TILE])
            sums += tl.dot(weights.to(dtype), value, input_precision="ieee")
    else:
        channel_v, real_v = _value_channels(WIDTH, PIECE, PIECE_COUNT, PIECE_TILE)
        for start in range(first, stop, BLOCK):
            entry = start + tl.arange(0, BLOCK)
            inside = entry < stop
            scores, seen = _scores(
                asked, keys, key_scales, before + entry, inside, channel_k, stored_k, key_width, positions, entry,
                own_r, window, scale, BITS, WINDOW, dtype,
            )  # fmt: skip
            weights, peak, total, sums = _softmax(scores, seen, peak, total, sums)
            value = load_vectors(values, value_scales, before + entry, inside, channel_v, real_v, WIDTH, BITS, dtype)
            sums += tl.dot(weights.to(dtype), value, input_precision="ieee")
    return slot.to(tl.int64), peak, total, sums


@triton.jit
def _late(
    late, query, query_b, query_h, query_q, row_r, token_r, own_r, tail_keys, tail_values, tail_b, tail_h, tail_t,
    tail_start, count, window, slots, tail_stretches, scale, peak, total, sums,
    TAIL_STRETCH: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, NEW: tl.constexpr, WIDTH: tl.constexpr,
    PIECE: tl.constexpr, PADDED: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, KEY_TILE: tl.constexpr,
    PIECE_COUNT: tl.constexpr, PIECE_TILE: tl.constexpr,
):  # fmt: skip
    """The same of a stretch of the tail, which is causal; a padded place sees itself."""
    dtype = query.dtype.element_ty
    channel_k = tl.arange(0, KEY_TILE)
    channel_v, real_v = _value_channels(WIDTH, PIECE, PIECE_COUNT, PIECE_TILE)
    owner, first = late // tail_stretches, late % tail_stretches * TAIL_STRETCH
    sample, head = (owner // KV_HEADS).to(tl.int64), owner % KV_HEADS
    query_r = query + sample * query_b + (head * GROUP + row_r // NEW) * query_h + token_r * query_q
    mask = (row_r < GROUP * NEW)[:, None] & (channel_k < WIDTH)[None, :]
    asked = tl.load(query_r[:, None] + channel_k[None, :], mask=mask, other=0)
    of_head, own = sample * tail_b + head * tail_h, own_r[:, None]
    stop = tl.minimum(first + TAIL_STRETCH, count)
    for start in range(first, stop, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < stop
        of_place = of_head + place.to(tl.int64)[:, None] * tail_t
        there = inside[:, None] & (channel_k < WIDTH)[None, :]
        key = tl.load(tail_keys + of_place + channel_k[None, :], mask=there, other=0).to(dtype)
        scores = tl.dot(asked, tl.trans(key), input_precision="ieee") * scale
        seen = inside[None, :] & (place[None, :] <= own)
        if PADDED:
            seen = (seen & (place[None, :] >= tl.load(tail_start + sample))) | (place[None, :] == own)
        if WINDOW:
            seen = seen & (own - place[None, :] < window)
        weights, peak, total, sums = _softmax(scores, seen, peak, total, sums)
        valued = inside[:, None] & real_v[None, :]
        value = tl.load(tail_values + of_place + channel_v[None, :], mask=valued, other=0).to(dtype)
        sums += tl.dot(weights.to(dtype), value, input_precision="ieee")
    return (slots + late).to(tl.int64), peak, total, sums


@triton.jit(do_not_specialize=["length", "later", "packed_programs", "window", "slots", "tail_stretches"])
def attend_stretch(
    query, query_b, query_h, query_q,
    tail_keys, tail_values, tail_b, tail_h, tail_t, tail_start, written, length, later,
    rows, items, packed_programs, first_position, window,
    part_sums, part_peaks, slots, tail_stretches, scale,
    TAIL_STRETCH: tl.constexpr, STRETCH: tl.constexpr, KV_HEADS: tl.constexpr, ROW_HEADS: tl.constexpr,
    GROUP: tl.constexpr, NEW: tl.constexpr, WIDTH: tl.constexpr, PIECE: tl.constexpr, BITS: tl.constexpr,
    KEY_DTYPE: tl.constexpr, VALUE_DTYPE: tl.constexpr, ALIGNED: tl.constexpr, CUT: tl.constexpr, PADDED: tl.constexpr,
    FIXED: tl.constexpr, WINDOW: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, KEY_TILE: tl.constexpr, PIECE_COUNT: tl.constexpr,
    PIECE_TILE: tl.constexpr,
):  # fmt: skip
    """One stretch of one head, for a tile of its query rows: unnormalised sums, their maximum and total.

    Programs of axis 0 are the packed stretches' heads, then the tail's stretches; axis 1 is the tile. ``scale`` holds
    log2(e). ``later`` appended tokens come after the last of these NEW.
    """
    program = tl.program_id(0)
    row_r = tl.program_id(1) * TILE + tl.arange(0, TILE)  # of the head's GROUP * NEW query rows
    token_r = row_r % NEW
    peak = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    sums = tl.zeros([TILE, PIECE_COUNT * PIECE_TILE], tl.float32)
    count = tl.load(written).to(tl.int32) if FIXED else length
    own_r = count - later - NEW + token_r  # places of the new tokens in the tail
    if program < packed_programs:
        slot, peak, total, sums = _packed(
            program, query, query_b, query_h, query_q, row_r, token_r, own_r, rows, items, first_position, window,
            scale, peak, total, sums, STRETCH, ROW_HEADS, GROUP, NEW, WIDTH, PIECE, BITS, KEY_DTYPE, VALUE_DTYPE,
            ALIGNED, CUT, WINDOW, BLOCK, KEY_TILE, PIECE_COUNT, PIECE_TILE,
        )  # fmt: skip
    else:
        slot, peak, total, sums = _late(
            program - packed_programs, query, query_b, query_h, query_q, row_r, token_r, own_r, tail_keys, tail_values,
            tail_b, tail_h, tail_t, tail_start, count, window, slots, tail_stretches, scale, peak, total, sums,
            TAIL_STRETCH, KV_HEADS, GROUP, NEW, WIDTH, PIECE, PADDED, WINDOW, BLOCK, KEY_TILE, PIECE_COUNT, PIECE_TILE,
        )  # fmt: skip
    out, real_r = slot * (GROUP * NEW) + row_r, row_r < GROUP * NEW
    channel_v, real_v = _value_channels(WIDTH, PIECE, PIECE_COUNT, PIECE_TILE)
    tl.store(part_sums + out[:, None] * WIDTH + channel_v[None, :], sums, mask=real_r[:, None] & real_v[None, :])
    tl.store(part_peaks + out * 2, peak, mask=real_r)
    tl.store(part_peaks + out * 2 + 1, total, mask=real_r)


@triton.jit(do_not_specialize=["slots", "tail_stretches"])
def join_stretches(
    part_sums, part_peaks, owners, slots, tail_stretches, out, out_b, out_h, out_q,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, NEW: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One query row of one head: its stretches' sums, brought to one maximum, over their totals."""
    owner, row = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(owners + owner * 2), tl.load(owners + owner * 2 + 1)
    channel = tl.arange(0, TILE)
    peak, total = float("-inf"), 0.0
    sums = tl.zeros([TILE], tl.float32)
    for number in range(count + tail_stretches):
        slot = tl.where(number < count, first + number, slots + owner * tail_stretches + number - count)
        part = slot.to(tl.int64) * (GROUP * NEW) + row
        own_peak, own_total = tl.load(part_peaks + part * 2), tl.load(part_peaks + part * 2 + 1)
        highest = tl.maximum(peak, own_peak)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        shrink, grow = tl.exp2(peak - base), tl.exp2(own_peak - base)
        own_sums = tl.load(part_sums + part * WIDTH + channel, mask=channel < WIDTH, other=0.0)
        sums = sums * shrink + own_sums * grow
        total = total * shrink + own_total * grow
        peak = highest
    sample, head = owner // KV_HEADS, owner % KV_HEADS * GROUP + row // NEW
    place = out + sample.to(tl.int64) * out_b + head * out_h + row % NEW * out_q
    tl.store(place + channel, (sums / total).to(out.dtype.element_ty), mask=channel < WIDTH)
