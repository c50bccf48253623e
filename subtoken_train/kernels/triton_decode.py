"""Fused decoding on packed storage, in Triton: scores, softmax and values of a stretch of entries in one pass.

Flash-decoding (Dao et al., 2023): every program takes one stretch of one head and leaves unnormalised sums with their
maximum; a second kernel joins a head's stretches. Of routed entries only stored pieces are read: an entry's flags say
which it has, and the count of the flags before it where they lie. Products and sums are in fp32, of operands in the
queries' dtype. Entries of unlike precision have launches of their own.

Shapes: r query rows, n entries, m channels, p pieces of w channels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from subtoken_train.kernels.formats import Kivi
from subtoken_train.kernels.row_table import Field

FIELDS: tl.constexpr = tl.constexpr(len(Field))
FLAGS: tl.constexpr = tl.constexpr(int(Field.FLAGS))
FLAG_BYTES: tl.constexpr = tl.constexpr(int(Field.FLAG_BYTES))
PIECE_BIT: tl.constexpr = tl.constexpr(int(Field.PIECE_BIT))
STARTS: tl.constexpr = tl.constexpr(int(Field.STARTS))
STRETCHES: tl.constexpr = tl.constexpr(int(Field.STRETCHES))
FILL: tl.constexpr = tl.constexpr(int(Field.FILL))
FILL_STEP: tl.constexpr = tl.constexpr(int(Field.FILL_STEP))
KEYS: tl.constexpr = tl.constexpr(int(Field.KEYS))
KEY_SCALES: tl.constexpr = tl.constexpr(int(Field.KEY_SCALES))
KEY_WIDTH: tl.constexpr = tl.constexpr(int(Field.KEY_WIDTH))
CHANNELS: tl.constexpr = tl.constexpr(int(Field.CHANNELS))
VALUES: tl.constexpr = tl.constexpr(int(Field.VALUES))
VALUE_SCALES: tl.constexpr = tl.constexpr(int(Field.VALUE_SCALES))
POSITIONS: tl.constexpr = tl.constexpr(int(Field.POSITIONS))
ENTRIES: tl.constexpr = tl.constexpr(int(Field.ENTRIES))
SAMPLE: tl.constexpr = tl.constexpr(int(Field.SAMPLE))
HEAD: tl.constexpr = tl.constexpr(int(Field.HEAD))
SLOTS: tl.constexpr = tl.constexpr(int(Field.SLOTS))
ZERO_CODES: tl.constexpr = tl.constexpr(0x88)  # A byte of two 4-bit codes that read as 0
RUN: tl.constexpr = tl.constexpr(Kivi.run)  # entries whose keys share scales and zero points, by channel; whole tiles


@triton.jit
def load_queries(
    query, query_b, query_h, query_q, sample, head, row, channel, real, new,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Load query rows ``row`` [r] of a key-value head, new tokens fastest, in channels ``channel`` [m], [r, m]."""
    own = query + sample * query_b + (head * GROUP + row // new) * query_h + row % new * query_q
    return tl.load(own[:, None] + channel[None, :], mask=(row < GROUP * new)[:, None] & real[None, :], other=0)


@triton.jit
def _unpacked(codes, place, BITS: tl.constexpr):
    """Return the codes at places ``place`` of a vector, as many a byte as go in, the first in the lowest bits."""
    return (codes.to(tl.int32) >> (place % (8 // BITS) * BITS)) & ((1 << BITS) - 1)


@triton.jit
def _above_zero(codes, scales, block, there):
    """Return codes of blocks ``block`` as their scales and zero points say, in fp32; 0 where ``there`` is not."""
    step = tl.load(scales + block * 2, mask=there, other=0).to(tl.float32)
    return codes.to(tl.float32) * step + tl.load(scales + block * 2 + 1, mask=there, other=0).to(tl.float32)


@triton.jit
def load_vectors(
    data, scales, first, inside, channel, real, width,
    BITS: tl.constexpr, SHARED: tl.constexpr, KEYS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Load n vectors from ``first`` in channels ``channel`` [m], [n, m] in DTYPE, as ``Format.read`` reads them.

    ``SHARED`` as ``Alike.shared``; KEYS: of a run, by channel.
    """
    mask, vector = inside[:, None] & real[None, :], first + tl.arange(0, inside.shape[0])
    if BITS == 0:
        return tl.load(data + vector[:, None] * width + channel[None, :], mask=mask, other=0).to(DTYPE)
    if SHARED:
        place = vector[:, None] * (width // (8 // BITS)) + channel[None, :] // (8 // BITS)
        codes = _unpacked(tl.load(data + place, mask=mask, other=0), channel[None, :], BITS)
        if KEYS:  # runs are whole tiles, and full
            tl.static_assert(RUN % inside.shape[0] == 0)
            return _above_zero(codes, scales, first // RUN * width + channel[None, :], real[None, :]).to(DTYPE)
        block = vector[:, None] * (width // SHARED) + channel[None, :] // SHARED
        return _above_zero(codes, scales, block, mask).to(DTYPE)
    scale = tl.load(scales + vector, mask=inside, other=0).to(tl.float32)[:, None]
    if BITS == 4:
        codes = tl.load(data + vector[:, None] * (width // 2) + channel[None, :] // 2, mask=mask, other=ZERO_CODES)
        return ((_unpacked(codes, channel[None, :], 4) - 8).to(tl.float32) * scale).to(DTYPE)
    codes = tl.load(data + vector[:, None] * width + channel[None, :], mask=mask, other=0)
    return (codes.to(tl.float32) * scale).to(DTYPE)


@triton.jit
def load_pieces(
    data, scales, entry, inside, number, stored, within,
    WIDTH: tl.constexpr, BITS: tl.constexpr, SHARED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Load pieces ``number`` [n, p] of entries that store them, [n, p, w] in DTYPE, 0 where they do not.

    All pieces of an ``entry`` [n] share its scale, and its zero point where there are such (SHARED is not 0).
    """
    there, number = stored != 0, number.to(tl.int64)
    mask, place = there[:, :, None] & (within < WIDTH)[None, None, :], within[None, None, :]
    if BITS == 0:
        return tl.load(data + number[:, :, None] * WIDTH + place, mask=mask, other=0).to(DTYPE)
    if SHARED:
        byte = number[:, :, None] * (WIDTH // (8 // BITS)) + place // (8 // BITS)
        read = _unpacked(tl.load(data + byte, mask=mask, other=0), place, BITS).to(tl.float32)
    elif BITS == 4:
        codes = tl.load(data + number[:, :, None] * (WIDTH // 2) + place // 2, mask=mask, other=ZERO_CODES)
        read = (_unpacked(codes, place, 4) - 8).to(tl.float32)
    else:
        read = tl.load(data + number[:, :, None] * WIDTH + place, mask=mask, other=0).to(tl.float32)
    by_entry = tl.reshape(read, [stored.shape[0], stored.shape[1] * within.shape[0]])
    if SHARED:
        by_entry = _above_zero(by_entry, scales, entry[:, None], inside[:, None])
        by_entry = tl.where(tl.reshape(mask, by_entry.shape), by_entry, 0.0)
    else:
        by_entry *= tl.load(scales + entry, mask=inside, other=0).to(tl.float32)[:, None]
    return tl.reshape(by_entry.to(DTYPE), [stored.shape[0], stored.shape[1], within.shape[0]])


@triton.jit
def stored_scores(
    asked, keys, scales, first, inside, channel, stored, width, positions, entry, own, window, scale,
    BITS: tl.constexpr, SHARED: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Return scores [r, n] of a tile of stored keys, and which entries each query row sees, [r, n] or [1, n]."""
    key = load_vectors(keys, scales, first, inside, channel, stored, width, BITS, SHARED, True, asked.dtype)
    scores = tl.dot(asked, tl.trans(key), input_precision="ieee") * scale
    seen = inside[None, :]
    if WINDOW:
        stands = tl.load(positions + entry, mask=inside, other=0)
        seen = seen & (own[:, None] - stands[None, :] < window)
    return scores, seen


@triton.jit
def running_softmax(scores, seen, peak, total, sums):
    """Return the weights of one more tile, and the running maximum, total and sums at its scale (base 2)."""
    scores = tl.where(seen, scores, float("-inf"))
    highest = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(highest == float("-inf"), 0.0, highest)  # nothing seen so far: no NaN
    weights, shrink = tl.exp2(scores - base[:, None]), tl.exp2(peak - base)
    return weights, highest, total * shrink + tl.sum(weights, 1), sums * shrink[:, None]


@triton.jit
def value_channels(WIDTH: tl.constexpr, PIECE: tl.constexpr, PIECE_COUNT: tl.constexpr, PIECE_TILE: tl.constexpr):
    """Return the value channels of a tile's columns, piece by piece, and which columns are real."""
    column = tl.arange(0, PIECE_COUNT * PIECE_TILE)
    channel = column // PIECE_TILE * PIECE + column % PIECE_TILE
    return channel, (column % PIECE_TILE < PIECE) & (channel < WIDTH)


@triton.jit
def set_bits(word):
    """Return how many bits of uint32 words are set."""
    word -= (word >> 1) & 0x55555555
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    return ((((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def next_pieces(
    flags_p, flag_bytes, owned_p, next_p, start, stop, values, value_scales,
    PIECE: tl.constexpr, BITS: tl.constexpr, SHARED: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
    PIECE_TILE: tl.constexpr,
):  # fmt: skip
    """Load the pieces of a tile of up to 32 entries from ``start``, [n, p, w], and the number that follows, [p].

    A piece's flags of the tile are one word, whose bits are counted: a scan would make threads wait for each other.
    """
    word_p = tl.zeros_like(owned_p).to(tl.uint32)
    for byte in tl.static_range(BLOCK // 8):
        place = start // 8 + byte
        there = owned_p & (start < stop) & (place < flag_bytes)
        word_p |= tl.load(flags_p + place, mask=there, other=0).to(tl.uint32) << (8 * byte)
    turn_n1 = tl.arange(0, BLOCK)[:, None].to(tl.uint32)
    number = next_p[None, :] + set_bits(word_p[None, :] & ((1 << turn_n1) - 1))
    stored = (word_p[None, :] >> turn_n1) & 1
    entry, within_w = start + tl.arange(0, BLOCK), tl.arange(0, PIECE_TILE)
    value = load_pieces(values, value_scales, entry, entry < stop, number, stored, within_w, PIECE, BITS, SHARED, DTYPE)
    return value, next_p + set_bits(word_p)


@triton.jit
def routed_entries(
    asked, keys, key_scales, values, value_scales, row, item, of_row, before, first, stop, positions, own_r, window,
    scale, channel_k, stored_k, key_width, peak, total, sums,
    WIDTH: tl.constexpr, PIECE: tl.constexpr, BITS: tl.constexpr, SHARED: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK: tl.constexpr, PIECE_COUNT: tl.constexpr, PIECE_TILE: tl.constexpr,
):  # fmt: skip
    """Add routed entries ``first`` to ``stop`` of a row to (maximum, total, sums).

    Where pieces lie is known only when flags are there, so no compiler loads them ahead: each turn loads the next's.
    """
    dtype = asked.dtype
    flag_bytes, piece_p = tl.load(row + FLAG_BYTES), tl.arange(0, PIECE_COUNT)
    owned_p, numbered_p = piece_p < WIDTH // PIECE, of_row * (WIDTH // PIECE) + piece_p
    bit_p = tl.load(tl.load(row + PIECE_BIT).to(tl.pointer_type(tl.int32)) + numbered_p, mask=owned_p, other=0)
    flags_p = tl.load(row + FLAGS).to(tl.pointer_type(tl.uint8)) + bit_p * flag_bytes
    starts = tl.load(row + STARTS).to(tl.pointer_type(tl.int32)) + tl.load(item + 2)
    next_p = tl.load(starts + numbered_p * tl.load(row + STRETCHES), mask=owned_p, other=0)
    value_scales += before * (2 if SHARED else 1)  # with a zero point each
    ahead, next_p = next_pieces(
        flags_p, flag_bytes, owned_p, next_p, first, stop, values, value_scales,
        PIECE, BITS, SHARED, dtype, BLOCK, PIECE_TILE,
    )  # fmt: skip
    for start in range(first, stop, BLOCK):
        entry, value = start + tl.arange(0, BLOCK), ahead
        inside = entry < stop
        ahead, next_p = next_pieces(
            flags_p, flag_bytes, owned_p, next_p, start + BLOCK, stop, values, value_scales,
            PIECE, BITS, SHARED, dtype, BLOCK, PIECE_TILE,
        )  # fmt: skip
        scores, seen = stored_scores(
            asked, keys, key_scales, before + start, inside, channel_k, stored_k, key_width, positions, entry, own_r,
            window, scale, BITS, SHARED, WINDOW,
        )  # fmt: skip
        weights, peak, total, sums = running_softmax(scores, seen, peak, total, sums)
        value = tl.reshape(value, [BLOCK, PIECE_COUNT * PIECE_TILE])
        sums += tl.dot(weights.to(dtype), value, input_precision="ieee")
    return peak, total, sums


@triton.jit
def filled_sums(
    row, of_row, total, sums,
    FILL_DTYPE: tl.constexpr, WIDTH: tl.constexpr, PIECE: tl.constexpr, PIECE_COUNT: tl.constexpr,
    PIECE_TILE: tl.constexpr,
):  # fmt: skip
    """Add the fill of a stretch of routed entries to its sums: once, weighed by their total."""
    channel_v, real_v = value_channels(WIDTH, PIECE, PIECE_COUNT, PIECE_TILE)
    fill = (tl.load(row + FILL) + of_row * tl.load(row + FILL_STEP)).to(tl.pointer_type(FILL_DTYPE))
    fill_v = tl.load(fill + channel_v, mask=real_v, other=0).to(tl.float32)
    return sums + total[:, None] * fill_v[None, :]


@triton.jit
def whole_entries(
    asked, keys, key_scales, values, value_scales, before, first, stop, positions, own_r, window, scale, channel_k,
    stored_k, key_width, peak, total, sums,
    WIDTH: tl.constexpr, PIECE: tl.constexpr, BITS: tl.constexpr, SHARED: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK: tl.constexpr, PIECE_COUNT: tl.constexpr, PIECE_TILE: tl.constexpr,
):  # fmt: skip
    """Add entries ``first`` to ``stop`` that are stored whole to (maximum, total, sums)."""
    dtype = asked.dtype
    channel_v, real_v = value_channels(WIDTH, PIECE, PIECE_COUNT, PIECE_TILE)
    for start in range(first, stop, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        inside = entry < stop
        scores, seen = stored_scores(
            asked, keys, key_scales, before + start, inside, channel_k, stored_k, key_width, positions, entry, own_r,
            window, scale, BITS, SHARED, WINDOW,
        )  # fmt: skip
        weights, peak, total, sums = running_softmax(scores, seen, peak, total, sums)
        value = load_vectors(
            values, value_scales, before + start, inside, channel_v, real_v, WIDTH, BITS, SHARED, False, dtype
        )
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
    """Return (slot, maximum, total, sums) of a stretch of the tail; it is causal, and a padded place sees itself."""
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


@triton.jit
def _packed(
    program, query, query_b, query_h, query_q, row_r, own_r, rows, items, first_position, window, scale,
    new, share, peak, total, sums,
    ROW_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
    PIECE: tl.constexpr, BITS: tl.constexpr, SHARED: tl.constexpr, KEY_DTYPE: tl.constexpr,
    VALUE_DTYPE: tl.constexpr, ALIGNED: tl.constexpr, CUT: tl.constexpr, FILLED: tl.constexpr,
    FILL_DTYPE: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, KEY_TILE: tl.constexpr,
    PIECE_COUNT: tl.constexpr, PIECE_TILE: tl.constexpr,
):  # fmt: skip
    """Return (slot, maximum, total, sums) of a stretch of packed entries for a tile of query rows."""
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
    head = tl.load(row + HEAD) + of_row
    asked = load_queries(query, query_b, query_h, query_q, sample, head, row_r, source_k, stored_k, new, GROUP)
    if WINDOW:
        own_r += tl.load(first_position + sample).to(tl.int32)
    before = of_row.to(tl.int64) * entries  # vectors of the row's heads before this one
    stop = tl.minimum(first + share, entries)
    if tl.load(row + FLAGS) != 0:
        peak, total, sums = routed_entries(
            asked, keys, key_scales, values, value_scales, row, item, of_row, before, first, stop, positions, own_r,
            window, scale, channel_k, stored_k, key_width, peak, total, sums,
            WIDTH, PIECE, BITS, SHARED, WINDOW, BLOCK, PIECE_COUNT, PIECE_TILE,
        )  # fmt: skip
        if FILLED:  # a stretch has entries of one kind alone: its total is what weighs the fill
            sums = filled_sums(row, of_row, total, sums, FILL_DTYPE, WIDTH, PIECE, PIECE_COUNT, PIECE_TILE)
    else:
        peak, total, sums = whole_entries(
            asked, keys, key_scales, values, value_scales, before, first, stop, positions, own_r, window, scale,
            channel_k, stored_k, key_width, peak, total, sums,
            WIDTH, PIECE, BITS, SHARED, WINDOW, BLOCK, PIECE_COUNT, PIECE_TILE,
        )  # fmt: skip
    return slot.to(tl.int64), peak, total, sums


CHANGING = ("length", "later", "packed_programs", "window", "slots", "tail_stretches", "new", "share")
"""Numbers that differ between steps and prompts: no kernel is compiled for some of their values."""


@triton.jit(do_not_specialize=CHANGING)
def attend_stretch(
    query, query_b, query_h, query_q,
    tail_keys, tail_values, tail_b, tail_h, tail_t, tail_start, written, length, later,
    rows, items, packed_programs, first_position, window,
    part_sums, part_peaks, slots, tail_stretches, scale, new, share,
    TAIL_STRETCH: tl.constexpr, KV_HEADS: tl.constexpr, ROW_HEADS: tl.constexpr,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PIECE: tl.constexpr, BITS: tl.constexpr, SHARED: tl.constexpr,
    KEY_DTYPE: tl.constexpr, VALUE_DTYPE: tl.constexpr, ALIGNED: tl.constexpr, CUT: tl.constexpr,
    FILLED: tl.constexpr, FILL_DTYPE: tl.constexpr, PADDED: tl.constexpr, FIXED: tl.constexpr, WINDOW: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, KEY_TILE: tl.constexpr, PIECE_COUNT: tl.constexpr,
    PIECE_TILE: tl.constexpr,
):  # fmt: skip
    """Attend to one stretch of one head for a tile of query rows; store unnormalised sums, maximum and total.

    Programs of axis 0 are the packed stretches' heads, then the tail's stretches; axis 1 is the tile. ``scale`` holds
    log2(e). ``later`` appended tokens come after the last of these ``new``; ``share`` is a stretch's entries.
    """
    program = tl.program_id(0)
    row_r = tl.program_id(1) * TILE + tl.arange(0, TILE)  # of the head's GROUP * new query rows
    peak = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    sums = tl.zeros([TILE, PIECE_COUNT * PIECE_TILE], tl.float32)
    count = tl.load(written).to(tl.int32) if FIXED else length
    own_r = count - later - new + row_r % new  # places of the new tokens in the tail
    if program < packed_programs:
        slot, peak, total, sums = _packed(
            program, query, query_b, query_h, query_q, row_r, own_r, rows, items, first_position, window,
            scale, new, share, peak, total, sums, ROW_HEADS, GROUP, WIDTH, PIECE, BITS, SHARED, KEY_DTYPE, VALUE_DTYPE,
            ALIGNED, CUT, FILLED, FILL_DTYPE, WINDOW, BLOCK, KEY_TILE, PIECE_COUNT, PIECE_TILE,
        )  # fmt: skip
    else:
        slot, peak, total, sums = tail_entries(
            program - packed_programs, query, query_b, query_h, query_q, row_r, own_r, tail_keys, tail_values,
            tail_b, tail_h, tail_t, tail_start, count, window, slots, tail_stretches, scale, new, peak, total, sums,
            TAIL_STRETCH, KV_HEADS, GROUP, WIDTH, PIECE, PADDED, WINDOW, BLOCK, KEY_TILE, PIECE_COUNT, PIECE_TILE,
        )  # fmt: skip
    out, real_r = slot * (GROUP * new) + row_r, row_r < GROUP * new
    channel_v, real_v = value_channels(WIDTH, PIECE, PIECE_COUNT, PIECE_TILE)
    tl.store(part_sums + out[:, None] * WIDTH + channel_v[None, :], sums, mask=real_r[:, None] & real_v[None, :])
    tl.store(part_peaks + out * 2, peak, mask=real_r)
    tl.store(part_peaks + out * 2 + 1, total, mask=real_r)


@triton.jit(do_not_specialize=CHANGING)
def join_stretches(
    part_sums, part_peaks, owners, slots, tail_stretches, new, out, out_b, out_h, out_q,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Join the stretches of one head for a tile of query rows: sums at one maximum, over their totals."""
    owner, row_r = tl.program_id(0), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    first, count = tl.load(owners + owner * 2), tl.load(owners + owner * 2 + 1)
    channel, real_r = tl.arange(0, TILE), row_r < GROUP * new
    mask = real_r[:, None] & (channel < WIDTH)[None, :]
    peak, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, TILE], tl.float32)
    for number in range(count + tail_stretches):
        slot = tl.where(number < count, first + number, slots + owner * tail_stretches + number - count)
        part = slot.to(tl.int64) * (GROUP * new) + row_r
        own_peak = tl.load(part_peaks + part * 2, mask=real_r, other=0.0)
        own_total = tl.load(part_peaks + part * 2 + 1, mask=real_r, other=1.0)
        highest = tl.maximum(peak, own_peak)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        shrink, grow = tl.exp2(peak - base), tl.exp2(own_peak - base)
        own_sums = tl.load(part_sums + part[:, None] * WIDTH + channel[None, :], mask=mask, other=0.0)
        sums = sums * shrink[:, None] + own_sums * grow[:, None]
        total = total * shrink + own_total * grow
        peak = highest
    sample, head_r = (owner // KV_HEADS).to(tl.int64), owner % KV_HEADS * GROUP + row_r // new
    place = out + sample * out_b + head_r * out_h + row_r % new * out_q
    tl.store(place[:, None] + channel[None, :], (sums / total[:, None]).to(out.dtype.element_ty), mask=mask)
