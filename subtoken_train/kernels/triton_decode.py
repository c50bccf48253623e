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

from subtoken_train.kernels.row_fields import Field
from subtoken_train.kernels.triton_entries import filled_sums, routed_entries, tail_entries, whole_entries
from subtoken_train.kernels.triton_tiles import load_queries, value_channels

FIELDS: tl.constexpr = tl.constexpr(len(Field))
KEYS: tl.constexpr = tl.constexpr(int(Field.KEYS))
KEY_SCALES: tl.constexpr = tl.constexpr(int(Field.KEY_SCALES))
KEY_WIDTH: tl.constexpr = tl.constexpr(int(Field.KEY_WIDTH))
CHANNELS: tl.constexpr = tl.constexpr(int(Field.CHANNELS))
VALUES: tl.constexpr = tl.constexpr(int(Field.VALUES))
VALUE_SCALES: tl.constexpr = tl.constexpr(int(Field.VALUE_SCALES))
FLAGS: tl.constexpr = tl.constexpr(int(Field.FLAGS))
POSITIONS: tl.constexpr = tl.constexpr(int(Field.POSITIONS))
ENTRIES: tl.constexpr = tl.constexpr(int(Field.ENTRIES))
SAMPLE: tl.constexpr = tl.constexpr(int(Field.SAMPLE))
HEAD: tl.constexpr = tl.constexpr(int(Field.HEAD))
SLOTS: tl.constexpr = tl.constexpr(int(Field.SLOTS))


@triton.jit
def _packed(
    program, query, query_b, query_h, query_q, row_r, own_r, rows, items, first_position, window, scale,
    new, share, peak, total, sums,
    ROW_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
    PIECE: tl.constexpr, BITS: tl.constexpr, KEY_DTYPE: tl.constexpr, VALUE_DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr, CUT: tl.constexpr, FILLED: tl.constexpr, FILL_DTYPE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK: tl.constexpr, KEY_TILE: tl.constexpr, PIECE_COUNT: tl.constexpr, PIECE_TILE: tl.constexpr,
):  # fmt: skip
    """A stretch of packed entries: (slot, maximum, total, sums) of the tile's query rows."""
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
            WIDTH, PIECE, BITS, WINDOW, BLOCK, PIECE_COUNT, PIECE_TILE,
        )  # fmt: skip
        if FILLED:  # a stretch has entries of one kind alone: its total is what weighs the fill
            sums = filled_sums(row, of_row, total, sums, FILL_DTYPE, WIDTH, PIECE, PIECE_COUNT, PIECE_TILE)
    else:
        peak, total, sums = whole_entries(
            asked, keys, key_scales, values, value_scales, before, first, stop, positions, own_r, window, scale,
            channel_k, stored_k, key_width, peak, total, sums,
            WIDTH, PIECE, BITS, WINDOW, BLOCK, PIECE_COUNT, PIECE_TILE,
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
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PIECE: tl.constexpr, BITS: tl.constexpr,
    KEY_DTYPE: tl.constexpr, VALUE_DTYPE: tl.constexpr, ALIGNED: tl.constexpr, CUT: tl.constexpr,
    FILLED: tl.constexpr, FILL_DTYPE: tl.constexpr, PADDED: tl.constexpr, FIXED: tl.constexpr, WINDOW: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, KEY_TILE: tl.constexpr, PIECE_COUNT: tl.constexpr,
    PIECE_TILE: tl.constexpr,
):  # fmt: skip
    """One stretch of one head, for a tile of its query rows: unnormalised sums, their maximum and total.

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
            scale, new, share, peak, total, sums, ROW_HEADS, GROUP, WIDTH, PIECE, BITS, KEY_DTYPE, VALUE_DTYPE,
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
    """A tile of one head's query rows: its stretches' sums, brought to one maximum, over their totals."""
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
