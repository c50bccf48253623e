"""Fused decoding on packed storage, in Triton: scores, softmax and values of a stretch of entries in one pass.

Flash-decoding (Dao et al., 2023): every program takes one stretch of one head and leaves unnormalised sums with their
maximum; a second kernel joins a head's stretches. Of routed entries only stored pieces are read: an entry's flags say
which it has, and the count of the flags before it where they lie. Products and sums are in fp32, of operands in the
queries' dtype. Entries of unlike precision have launches of their own.

Shapes: r query rows, n entries, m channels, p pieces of w channels.
"""

from dataclasses import make_dataclass

import triton
import triton.language as tl

from subtoken_train.kernels.formats import Kivi
from subtoken_train.kernels.row_table import Field

FIELDS: tl.constexpr = tl.constexpr(len(Field))
AT: tl.constexpr = tl.constexpr(make_dataclass("Fields", Field.__members__, frozen=True)(*map(int, Field)))
vars(AT).update(vars(AT.value))  # the interpreter reads attributes of the constant itself
ZERO_CODES: tl.constexpr = tl.constexpr(0x88)  # A byte of two 4-bit codes that read as 0
RUN: tl.constexpr = tl.constexpr(Kivi.run)  # entries whose keys share scales and zero points, by channel; whole tiles


@triton.jit
def load_queries(query, query_b, query_h, query_q, sample, head, row, channel, real, new, OF: tl.constexpr):
    """Load query rows ``row`` [r] of a key-value head, new tokens fastest, in channels ``channel`` [m], [r, m]."""
    own = query + sample * query_b + (head * OF.group + row // new) * query_h + row % new * query_q
    return tl.load(own[:, None] + channel[None, :], mask=(row < OF.group * new)[:, None] & real[None, :], other=0)


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
def load_vectors(data, scales, first, inside, channel, real, width, KEYS: tl.constexpr, OF: tl.constexpr):
    """Load n vectors from ``first`` in channels ``channel`` [m], [n, m] in OF.dtype, as ``Format.read`` reads them.

    ``OF.shared`` as ``Alike.shared``; KEYS: of a run, by channel.
    """
    mask, vector = inside[:, None] & real[None, :], first + tl.arange(0, inside.shape[0])
    if OF.bits == 0:
        return tl.load(data + vector[:, None] * width + channel[None, :], mask=mask, other=0).to(OF.dtype)
    if OF.shared:
        place = vector[:, None] * (width // (8 // OF.bits)) + channel[None, :] // (8 // OF.bits)
        codes = _unpacked(tl.load(data + place, mask=mask, other=0), channel[None, :], OF.bits)
        if KEYS:  # runs are whole tiles, and full
            tl.static_assert(RUN % inside.shape[0] == 0)
            return _above_zero(codes, scales, first // RUN * width + channel[None, :], real[None, :]).to(OF.dtype)
        block = vector[:, None] * (width // OF.shared) + channel[None, :] // OF.shared
        return _above_zero(codes, scales, block, mask).to(OF.dtype)
    scale = tl.load(scales + vector, mask=inside, other=0).to(tl.float32)[:, None]
    if OF.bits == 4:
        codes = tl.load(data + vector[:, None] * (width // 2) + channel[None, :] // 2, mask=mask, other=ZERO_CODES)
        return ((_unpacked(codes, channel[None, :], 4) - 8).to(tl.float32) * scale).to(OF.dtype)
    codes = tl.load(data + vector[:, None] * width + channel[None, :], mask=mask, other=0)
    return (codes.to(tl.float32) * scale).to(OF.dtype)


@triton.jit
def load_pieces(data, scales, entry, inside, number, stored, within, OF: tl.constexpr):
    """Load pieces ``number`` [n, p] of entries that store them, [n, p, w] in OF.dtype, 0 where they do not.

    All pieces of an ``entry`` [n] share its scale, and its zero point where there are such (OF.shared is not 0).
    """
    there, number = stored != 0, number.to(tl.int64)
    mask, place = there[:, :, None] & (within < OF.piece)[None, None, :], within[None, None, :]
    if OF.bits == 0:
        return tl.load(data + number[:, :, None] * OF.piece + place, mask=mask, other=0).to(OF.dtype)
    if OF.shared:
        byte = number[:, :, None] * (OF.piece // (8 // OF.bits)) + place // (8 // OF.bits)
        read = _unpacked(tl.load(data + byte, mask=mask, other=0), place, OF.bits).to(tl.float32)
    elif OF.bits == 4:
        codes = tl.load(data + number[:, :, None] * (OF.piece // 2) + place // 2, mask=mask, other=ZERO_CODES)
        read = (_unpacked(codes, place, 4) - 8).to(tl.float32)
    else:
        read = tl.load(data + number[:, :, None] * OF.piece + place, mask=mask, other=0).to(tl.float32)
    by_entry = tl.reshape(read, [stored.shape[0], stored.shape[1] * within.shape[0]])
    if OF.shared:
        by_entry = _above_zero(by_entry, scales, entry[:, None], inside[:, None])
        by_entry = tl.where(tl.reshape(mask, by_entry.shape), by_entry, 0.0)
    else:
        by_entry *= tl.load(scales + entry, mask=inside, other=0).to(tl.float32)[:, None]
    return tl.reshape(by_entry.to(OF.dtype), [stored.shape[0], stored.shape[1], within.shape[0]])


@triton.jit
def stored_scores(
    asked, keys, scales, first, inside, channel, stored, width, positions, entry, own, window, scale, OF: tl.constexpr
):
    """Return scores [r, n] of a tile of stored keys, and which entries each query row sees, [r, n] or [1, n]."""
    key = load_vectors(keys, scales, first, inside, channel, stored, width, True, OF)
    scores = tl.dot(asked, tl.trans(key), input_precision="ieee") * scale
    seen = inside[None, :]
    if OF.window:
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
def value_channels(OF: tl.constexpr):
    """Return the value channels of a tile's columns, piece by piece, and which columns are real."""
    column = tl.arange(0, OF.piece_count * OF.piece_tile)
    channel = column // OF.piece_tile * OF.piece + column % OF.piece_tile
    return channel, (column % OF.piece_tile < OF.piece) & (channel < OF.width)


@triton.jit
def set_bits(word):
    """Return how many bits of uint32 words are set."""
    word -= (word >> 1) & 0x55555555
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    return ((((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def next_pieces(flags_p, flag_bytes, owned_p, next_p, start, stop, values, value_scales, OF: tl.constexpr):
    """Load the pieces of a tile of up to 32 entries from ``start``, [n, p, w], and the number that follows, [p].

    A piece's flags of the tile are one word, whose bits are counted: a scan would make threads wait for each other.
    """
    word_p = tl.zeros_like(owned_p).to(tl.uint32)
    for byte in tl.static_range(OF.block // 8):
        place = start // 8 + byte
        there = owned_p & (start < stop) & (place < flag_bytes)
        word_p |= tl.load(flags_p + place, mask=there, other=0).to(tl.uint32) << (8 * byte)
    turn_n1 = tl.arange(0, OF.block)[:, None].to(tl.uint32)
    number = next_p[None, :] + set_bits(word_p[None, :] & ((1 << turn_n1) - 1))
    stored = (word_p[None, :] >> turn_n1) & 1
    entry, within_w = start + tl.arange(0, OF.block), tl.arange(0, OF.piece_tile)
    value = load_pieces(values, value_scales, entry, entry < stop, number, stored, within_w, OF)
    return value, next_p + set_bits(word_p)


@triton.jit
def stored_entries(
    asked, keys, key_scales, values, value_scales, row, item, of_row, before, first, stop, positions, own_r, window,
    scale, channel_k, stored_k, key_width, peak, total, sums, ROUTED: tl.constexpr, OF: tl.constexpr,
):  # fmt: skip
    """Add entries ``first`` to ``stop`` of a row, all routed or all whole, to (maximum, total, sums).

    Where pieces lie is known only when flags are there, so no compiler loads them ahead: each turn loads the next's.
    """
    channel_v, real_v = value_channels(OF)
    if ROUTED:
        flagged, piece_p = tl.load(row + AT.FLAG_BYTES), tl.arange(0, OF.piece_count)
        owned_p, numbered_p = piece_p < OF.width // OF.piece, of_row * (OF.width // OF.piece) + piece_p
        bit_p = tl.load(tl.load(row + AT.PIECE_BIT).to(tl.pointer_type(tl.int32)) + numbered_p, mask=owned_p, other=0)
        flags_p = tl.load(row + AT.FLAGS).to(tl.pointer_type(tl.uint8)) + bit_p * flagged
        starts = tl.load(row + AT.STARTS).to(tl.pointer_type(tl.int32)) + tl.load(item + 2)
        next_p = tl.load(starts + numbered_p * tl.load(row + AT.STRETCHES), mask=owned_p, other=0)
        scales_p = value_scales + before * (2 if OF.shared else 1)  # with a zero point each
        ahead, next_p = next_pieces(flags_p, flagged, owned_p, next_p, first, stop, values, scales_p, OF)
    for start in range(first, stop, OF.block):
        entry = start + tl.arange(0, OF.block)
        inside = entry < stop
        if ROUTED:
            value = tl.reshape(ahead, [OF.block, OF.piece_count * OF.piece_tile])
            ahead, next_p = next_pieces(flags_p, flagged, owned_p, next_p, start + OF.block, stop, values, scales_p, OF)
        scores, seen = stored_scores(
            asked, keys, key_scales, before + start, inside, channel_k, stored_k, key_width, positions, entry, own_r,
            window, scale, OF,
        )  # fmt: skip
        weights, peak, total, sums = running_softmax(scores, seen, peak, total, sums)
        if not ROUTED:
            value = load_vectors(values, value_scales, before + start, inside, channel_v, real_v, OF.width, False, OF)
        sums += tl.dot(weights.to(asked.dtype), value, input_precision="ieee")
    if ROUTED and OF.filled:  # a stretch has entries of one kind alone: its total is what weighs the fill, once
        fill = (tl.load(row + AT.FILL) + of_row * tl.load(row + AT.FILL_STEP)).to(tl.pointer_type(OF.fill_dtype))
        sums += total[:, None] * tl.load(fill + channel_v, mask=real_v, other=0).to(tl.float32)[None, :]
    return peak, total, sums


@triton.jit
def tail_entries(
    late, query, query_b, query_h, query_q, row_r, own_r, tail_keys, tail_values, tail_b, tail_h, tail_t, tail_start,
    count, window, slots, tail_stretches, scale, new, peak, total, sums, OF: tl.constexpr,
):  # fmt: skip
    """Return (slot, maximum, total, sums) of a stretch of the tail; it is causal, and a padded place sees itself."""
    dtype = query.dtype.element_ty
    channel_k = tl.arange(0, OF.key_tile)
    channel_v, real_v = value_channels(OF)
    owner, first = late // tail_stretches, late % tail_stretches * OF.tail_stretch
    sample, head = (owner // OF.kv_heads).to(tl.int64), (owner % OF.kv_heads).to(tl.int64)
    real_k = channel_k < OF.width
    asked = load_queries(query, query_b, query_h, query_q, sample, head, row_r, channel_k, real_k, new, OF)
    of_head, own = sample * tail_b + head * tail_h, own_r[:, None]
    stop = tl.minimum(first + OF.tail_stretch, count)
    for start in range(first, stop, OF.block):
        place = start + tl.arange(0, OF.block)
        inside = place < stop
        of_place = of_head + place.to(tl.int64)[:, None] * tail_t
        there = inside[:, None] & real_k[None, :]
        key = tl.load(tail_keys + of_place + channel_k[None, :], mask=there, other=0).to(dtype)
        scores = tl.dot(asked, tl.trans(key), input_precision="ieee") * scale
        seen = inside[None, :] & (place[None, :] <= own)
        if OF.padded:
            seen = (seen & (place[None, :] >= tl.load(tail_start + sample))) | (place[None, :] == own)
        if OF.window:
            seen = seen & (own - place[None, :] < window)
        weights, peak, total, sums = running_softmax(scores, seen, peak, total, sums)
        valued = inside[:, None] & real_v[None, :]
        value = tl.load(tail_values + of_place + channel_v[None, :], mask=valued, other=0).to(dtype)
        sums += tl.dot(weights.to(dtype), value, input_precision="ieee")
    return (slots + late).to(tl.int64), peak, total, sums


@triton.jit
def _packed(
    program, query, query_b, query_h, query_q, row_r, own_r, rows, items, first_position, window, scale, new, share,
    peak, total, sums, OF: tl.constexpr,
):  # fmt: skip
    """Return (slot, maximum, total, sums) of a stretch of packed entries for a tile of query rows."""
    channel_k = tl.arange(0, OF.key_tile)
    item, of_row = items + program // OF.row_heads * 4, program % OF.row_heads
    row, first = rows + tl.load(item).to(tl.int64) * FIELDS, tl.load(item + 1)
    entries, sample = tl.load(row + AT.ENTRIES).to(tl.int32), tl.load(row + AT.SAMPLE)
    slot = tl.load(item + 3) + of_row * tl.load(row + AT.SLOTS)
    aligned: tl.constexpr = OF.aligned
    keys = tl.multiple_of(tl.load(row + AT.KEYS).to(tl.pointer_type(OF.key_dtype)), aligned)
    values = tl.multiple_of(tl.load(row + AT.VALUES).to(tl.pointer_type(OF.value_dtype)), aligned)
    key_scales = tl.load(row + AT.KEY_SCALES).to(tl.pointer_type(tl.float16))
    value_scales = tl.load(row + AT.VALUE_SCALES).to(tl.pointer_type(tl.float16))
    positions = tl.load(row + AT.POSITIONS).to(tl.pointer_type(tl.int32))
    source_k = channel_k
    if OF.cut:
        key_width = tl.load(row + AT.KEY_WIDTH).to(tl.int32)
        channels = tl.load(row + AT.CHANNELS)
        if channels != 0:
            places = channels.to(tl.pointer_type(tl.uint8)) + of_row * key_width
            source_k = tl.load(places + channel_k, mask=channel_k < key_width, other=0).to(tl.int32)
    else:
        key_width: tl.constexpr = OF.width
    stored_k = channel_k < key_width
    head = tl.load(row + AT.HEAD) + of_row
    asked = load_queries(query, query_b, query_h, query_q, sample, head, row_r, source_k, stored_k, new, OF)
    if OF.window:
        own_r += tl.load(first_position + sample).to(tl.int32)
    before = of_row.to(tl.int64) * entries  # vectors of the row's heads before this one
    stop = tl.minimum(first + share, entries)
    if tl.load(row + AT.FLAGS) != 0:
        peak, total, sums = stored_entries(
            asked, keys, key_scales, values, value_scales, row, item, of_row, before, first, stop, positions, own_r,
            window, scale, channel_k, stored_k, key_width, peak, total, sums, True, OF,
        )  # fmt: skip
    else:
        peak, total, sums = stored_entries(
            asked, keys, key_scales, values, value_scales, row, item, of_row, before, first, stop, positions, own_r,
            window, scale, channel_k, stored_k, key_width, peak, total, sums, False, OF,
        )  # fmt: skip
    return slot.to(tl.int64), peak, total, sums


Made = make_dataclass(
    "Made", [
        "bits", "shared", "key_dtype", "value_dtype", "tail_stretch", "kv_heads", "group", "width", "piece",
        "row_heads", "aligned", "cut", "filled", "fill_dtype", "padded", "fixed", "window", "dtype", "tile", "block",
        "key_tile", "piece_count", "piece_tile",
    ], frozen=True,
)  # fmt: skip
"""Tells the kernel how entries are stored, a layer's shape, what there is, tiles (powers of 2)."""
CHANGING = ("length", "later", "packed_programs", "window", "slots", "tail_stretches", "new", "share")
"""Numbers that differ between steps and prompts: no kernel is compiled for some of their values."""


@triton.jit(do_not_specialize=CHANGING)
def attend_stretch(
    query, query_b, query_h, query_q, tail_keys, tail_values, tail_b, tail_h, tail_t, tail_start, written, length,
    later, rows, items, packed_programs, first_position, window, part_sums, part_peaks, slots, tail_stretches, scale,
    new, share, OF: tl.constexpr,
):  # fmt: skip
    """Attend to one stretch of one head for a tile of query rows; store unnormalised sums, maximum and total.

    Programs of axis 0 are the packed stretches' heads, then the tail's stretches; axis 1 is the tile. ``scale`` holds
    log2(e). ``later`` appended tokens come after the last of these ``new``; ``share`` is a stretch's entries.
    """
    program = tl.program_id(0)
    row_r = tl.program_id(1) * OF.tile + tl.arange(0, OF.tile)  # of the head's rows of queries
    peak = tl.full([OF.tile], float("-inf"), tl.float32)
    total = tl.full([OF.tile], 0.0, tl.float32)
    sums = tl.full([OF.tile, OF.piece_count * OF.piece_tile], 0.0, tl.float32)
    count = tl.load(written).to(tl.int32) if OF.fixed else length
    own_r = count - later - new + row_r % new  # places of the new tokens in the tail
    if program < packed_programs:
        slot, peak, total, sums = _packed(
            program, query, query_b, query_h, query_q, row_r, own_r, rows, items, first_position, window, scale, new,
            share, peak, total, sums, OF,
        )  # fmt: skip
    else:
        slot, peak, total, sums = tail_entries(
            program - packed_programs, query, query_b, query_h, query_q, row_r, own_r, tail_keys, tail_values, tail_b,
            tail_h, tail_t, tail_start, count, window, slots, tail_stretches, scale, new, peak, total, sums, OF,
        )  # fmt: skip
    out, real_r = slot * (OF.group * new) + row_r, row_r < OF.group * new
    channel_v, real_v = value_channels(OF)
    tl.store(part_sums + out[:, None] * OF.width + channel_v[None, :], sums, mask=real_r[:, None] & real_v[None, :])
    tl.store(part_peaks + out * 2, peak, mask=real_r)
    tl.store(part_peaks + out * 2 + 1, total, mask=real_r)


@triton.jit(do_not_specialize=CHANGING)
def join_stretches(
    part_sums, part_peaks, owners, slots, tail_stretches, new, out, out_b, out_h, out_q, KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
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
