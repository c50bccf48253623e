"""Packs a layer in one launch, in Triton: entries are found, gathered, cut into pieces, rounded and written.

A program takes a stretch of the entries of one kind that one head of one row stores, and writes their keys and values
where they stay. Everything beside is small: a sort of the marks, a count of the flags, and a table that says where each
(row, kind) writes (``row_table.py``). Sizes are known on the host, which reads nothing. How numbers are rounded a
format's ``Rounding`` says. They are those of ``cache/pack.py``; where a vector is summed (its norm, its rotation, what
a scale loses, errors passed on) fp32's sums have another order.

Legend: B batch, h key-value heads, N rows of the prompt, d head width, R rows of storage, c heads of a row, K kinds, M
entries of the plan, S bits of an entry; n entries of a program, p pieces of a head, w channels of a piece, m = p * w. A
vector that is stored whole is one piece.
"""

from contextlib import nullcontext
from dataclasses import make_dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from subtoken_train.kernels.formats import Format
from subtoken_train.kernels.triton_decode import AT, FIELDS

HALF_EVEN: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2^23: what is added to it is rounded to a whole number
LEAST: tl.constexpr = tl.constexpr(2.0**-24)  # of fp16, as is the next
MOST: tl.constexpr = tl.constexpr(65504.0)
E4M3: tl.constexpr = tl.constexpr(448.0)
ENTRIES = 16  # of a program of 4 warps: of 32 most shapes take all registers of a thread


@triton.jit
def _whole(numbers, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Return the nearest whole numbers from LOW to HIGH, of two the even one."""
    return tl.clamp((numbers + HALF_EVEN) - HALF_EVEN, LOW, HIGH)


@triton.jit
def _floats(numbers, BITS: tl.constexpr, MANTISSA: tl.constexpr):
    """Return the codes of the nearest floats of so many bits, of two the even one; none is too large."""
    least: tl.constexpr = 2 - (1 << (BITS - 2 - MANTISSA))  # exponent of the first that is normal
    drop: tl.constexpr = 23 - MANTISSA
    word, size = numbers.to(tl.int32, bitcast=True), tl.abs(numbers)
    above = word & 0x7FFFFFFF
    above = ((above + (1 << (drop - 1)) - 1 + ((above >> drop) & 1)) >> drop) - ((126 + least) << MANTISSA)
    below = _whole(size * 2.0 ** (MANTISSA - least), 0.0, MOST).to(tl.int32)
    return tl.where(size < 2.0**least, below, above) | (((word >> 31) & 1) << (BITS - 1))


@triton.jit
def _store_codes(codes, data, number, stored, width, size, BITS: tl.constexpr):
    """Store the lowest BITS of codes [n, p, w] as pieces ``number`` [n, p] of ``size`` bytes, the first lowest."""
    per: tl.constexpr = 8 // (BITS & -BITS)  # codes of a word
    length: tl.constexpr = codes.shape[2] // per
    codes = tl.reshape(codes & ((1 << BITS) - 1), [codes.shape[0], codes.shape[1], length, per])
    words, word = tl.sum(codes << (tl.arange(0, per) * BITS)[None, None, None, :], 3), tl.arange(0, length)
    at = data + number[:, :, None] * size + (word * (BITS * per // 8))[None, None, :]
    mask = stored[:, :, None] & (word < width // per)[None, None, :]
    for byte in tl.static_range(BITS * per // 8):
        tl.store(at + byte, (words >> (8 * byte)).to(tl.uint8), mask=mask)


@triton.jit
def _above_zero(wide, real, scales, stands, there, width, HOW: tl.constexpr):
    """Return codes of vectors [n, m] from the least ``real`` number of a block; write scales and zero points."""
    runs: tl.constexpr = wide.shape[0] // HOW.run
    block: tl.constexpr = HOW.block if HOW.block else wide.shape[1]
    parts: tl.constexpr = wide.shape[1] // block
    shape: tl.constexpr = [runs, HOW.run, parts, block]
    own, inside = tl.reshape(wide, shape), tl.reshape(real, shape)
    low = tl.min(tl.min(tl.where(inside, own, float("inf")), 3), 1)
    high = tl.max(tl.max(tl.where(inside, own, float("-inf")), 3), 1)
    low, high = tl.where(low > high, 0.0, low), tl.where(low > high, 0.0, high)  # nothing is stored
    zero = tl.clamp(low, -MOST, MOST).to(tl.float16)
    step = tl.div_rn(high - zero.to(tl.float32), tl.full(high.shape, HOW.top, tl.float32))
    step = tl.clamp(step, LEAST, MOST).to(tl.float16)
    count, part = width // block if HOW.block else 1, tl.arange(0, parts)
    place = tl.min(tl.reshape(stands, [runs, HOW.run]), 1) // HOW.run
    held = tl.max(tl.reshape(there.to(tl.int32), [runs, HOW.run]), 1) != 0
    mask = held[:, None] & (part < count)[None, :]
    at = scales + (place[:, None] * count + part[None, :]) * 2
    tl.store(at, step, mask=mask)
    tl.store(at + 1, zero, mask=mask)
    apart = own - zero.to(tl.float32)[:, None, :, None]
    times = tl.div_rn(apart, tl.broadcast_to(step.to(tl.float32)[:, None, :, None], apart.shape))
    return tl.reshape(_whole(times, 0.0, HOW.top).to(tl.int32), wide.shape)


@triton.jit
def _levels(wide, scales, stands, there, HOW: tl.constexpr):
    """Return the numbers of the levels that turned vectors [n, m] are nearest to, and write their norms."""
    norm = tl.sqrt_rn(tl.sum(wide * wide, 1))
    tl.store(scales + stands, tl.minimum(norm, MOST).to(tl.float16), mask=there)
    turned = tl.div_rn(wide, tl.broadcast_to(tl.maximum(norm, 1e-12)[:, None], wide.shape))
    turns: tl.constexpr = HOW.turns
    half: tl.constexpr = 1 << (turns - 1)
    for _ in tl.static_range(turns):  # the lowest bit of a channel's number goes to the top
        low, high = tl.split(tl.reshape(turned, [wide.shape[0], wide.shape[1] // (2 * half), half, 2]))
        turned = tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 1, 3, 2)), wide.shape)
    codes = tl.zeros(wide.shape, tl.int32)
    for edge in tl.static_range(len(HOW.edges)):
        codes += (turned >= HOW.edges[edge]).to(tl.int32)
    return codes


@triton.jit
def _in_scale(wide, scales, stands, there, width, errors, HOW: tl.constexpr, FED: tl.constexpr):
    """Return vectors [n, m] in units of their scales, and write these; rounded already where errors are passed on."""
    largest = tl.max(tl.abs(wide), 1)
    scale, least = _scale(largest, HOW.top), tl.full(largest.shape, float("inf"), tl.float32)
    for share in tl.static_range(len(HOW.shares)):
        tried = _scale(largest * HOW.shares[share], HOW.top)
        unit = tl.broadcast_to(tried.to(tl.float32)[:, None], wide.shape)
        apart = _whole(tl.div_rn(wide, unit), -HOW.top, HOW.top) * unit - wide
        lost = tl.sum(apart * apart, 1)
        scale, least = tl.where(lost < least, tried, scale), tl.minimum(lost, least)
    tl.store(scales + stands, scale, mask=there)
    unit = scale.to(tl.float32)
    times = tl.div_rn(wide, tl.broadcast_to(unit[:, None], wide.shape))
    if FED:
        lost_m, column = tl.zeros(wide.shape, tl.float32), tl.arange(0, wide.shape[1])
        for channel in range(width):
            here = (column == channel)[None, :]
            own = tl.sum(tl.where(here, wide, 0.0), 1)
            asked = tl.load(errors + channel * width + column, mask=column < channel, other=0)
            whole = _whole(tl.div_rn(own - tl.sum(asked[None, :] * lost_m, 1), unit), -HOW.top, HOW.top)
            lost_m = tl.where(here, (whole * unit - own)[:, None], lost_m)
            times = tl.where(here, whole[:, None], times)
    return times


@triton.jit
def _scale(largest, TOP: tl.constexpr):
    return tl.maximum(tl.div_rn(largest, tl.full(largest.shape, TOP, tl.float32)), LEAST).to(tl.float16)


@triton.jit
def _by_inner(times, data, number, stored, width, size, HOW: tl.constexpr):
    """Return codes of numbers [n, p, w] in units of e4m3 scales of their own, and write these after the codes."""
    parts: tl.constexpr = times.shape[2] // HOW.inner
    top: tl.constexpr = HOW.top / E4M3
    own = tl.reshape(times, [times.shape[0], times.shape[1], parts, HOW.inner])
    largest = tl.max(tl.abs(own), 3)
    codes = _floats(tl.minimum(tl.div_rn(largest, tl.full(largest.shape, top, tl.float32)), E4M3), 8, 3)
    _store_codes(codes, data + width * HOW.bits // 8, number, stored, width // HOW.inner, size, 8)
    above = ((codes << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    scale = tl.broadcast_to(tl.where(codes < 8, codes.to(tl.float32) / 512, above)[:, :, :, None], own.shape)
    own = tl.where(scale > 0, tl.div_rn(own, tl.where(scale > 0, scale, 1.0)), 0.0)
    return tl.reshape(_floats(tl.clamp(own, -top, top), HOW.bits, HOW.mantissa), times.shape)


@triton.jit
def _store(
    vectors, real, data, scales, number, stored, stands, there, width, errors, PART: tl.constexpr, OF: tl.constexpr
):
    """Store vectors [n, m], 0 where not ``real``, as pieces ``number`` [n, p] of ``width`` channels each.

    Scales lie at ``stands`` [n]; without their address, nothing is rounded. PART: of keys 0, values 1, pieces 2.
    """
    HOW: tl.constexpr = OF.how[PART]
    tile: tl.constexpr = vectors.shape[1] // number.shape[1]
    shape: tl.constexpr = [number.shape[0], number.shape[1], tile]
    if scales == 0:
        within = tl.arange(0, tile)[None, None, :]
        at = data.to(tl.pointer_type(vectors.dtype)) + number[:, :, None] * width + within
        tl.store(at, tl.reshape(vectors, shape), mask=stored[:, :, None] & (within < width))
    elif HOW.bits:
        wide, into = vectors.to(tl.float32), data.to(tl.pointer_type(tl.uint8))
        beside, size = scales.to(tl.pointer_type(tl.float16)), width * HOW.bits // 8
        if HOW.turns:
            codes = _levels(wide, beside, stands, there, HOW)
        elif HOW.zero:
            codes = _above_zero(wide, real, beside, stands, there, width, HOW)
        else:
            times = _in_scale(wide, beside, stands, there, width, errors, HOW, OF.fed and PART == 0)
            if HOW.inner:
                size += width // HOW.inner
                codes = _by_inner(tl.reshape(times, shape), into, number, stored, width, size, HOW)
            elif HOW.mantissa:
                codes = _floats(tl.clamp(times, -HOW.top, HOW.top), HOW.bits, HOW.mantissa)
            else:
                codes = (_whole(times, -HOW.top, HOW.top) + (HOW.top + 1 if HOW.bits < 8 else 0)).to(tl.int32)
        _store_codes(tl.reshape(codes, shape), into, number, stored, width, size, HOW.bits)


@triton.jit
def _store_pieces(
    own, starts, flags, counted, fill, from_value, row, head, of_kind, place, stands, there, entries, bits,
    OF: tl.constexpr,
):  # fmt: skip
    """Write the pieces that entries [n] of one head of a row store; the count of flags before them says where."""
    piece, within = tl.arange(0, OF.piece_count), tl.arange(0, OF.piece_tile)
    owned, of_row = piece < OF.width // OF.piece, head * (OF.width // OF.piece) + piece
    piece_bit = tl.load(own + AT.PIECE_BIT).to(tl.pointer_type(tl.int32))
    bit, both = tl.load(piece_bit + of_row, mask=owned, other=0), there[:, None] & owned[None, :]
    flagged = flags + (row * bits + bit)[None, :] * entries + place[:, None]
    stored = (tl.load(flagged, mask=both, other=0) != 0) & both
    before = counted + (of_kind * bits + bit)[None, :] * entries + place[:, None]
    first = tl.load(starts.to(tl.pointer_type(tl.int32)) + of_row, mask=owned, other=0).to(tl.int64)
    number = first[None, :] + tl.load(before, mask=stored, other=1) - 1
    channel = piece[:, None] * OF.piece + within[None, :]
    mask = stored[:, :, None] & (within < OF.piece)[None, None, :]
    pieces = tl.load(from_value[:, None, None] + channel[None, :, :], mask=mask, other=0)
    if OF.filled:
        real = owned[:, None] & (within < OF.piece)[None, :]
        read = tl.load(fill + (row * OF.heads + head) * OF.width + channel, mask=real, other=0).to(tl.float32)
        pieces = tl.where(mask, pieces.to(tl.float32) - read[None, :, :], 0.0).to(pieces.dtype)
    shape: tl.constexpr = [pieces.shape[0], OF.piece_count * OF.piece_tile]  # an entry's head has one scale
    _store(
        tl.reshape(pieces, shape), tl.reshape(mask, shape), tl.load(own + AT.VALUES), tl.load(own + AT.VALUE_SCALES),
        number, stored, stands, there, OF.piece, own, 2, OF,
    )  # fmt: skip


@triton.jit
def _store_flags(index, size, flags, row, first, place, there, entries, bits, OF: tl.constexpr):
    """Write the flags of entries [n] from the ``first``, eight a byte, as ``pack_bits`` does."""
    flag, byte = tl.arange(0, OF.bit_tile), first // 8 + tl.arange(0, OF.block // 8)
    flagged = flags + (row * bits + flag)[None, :] * entries + place[:, None]
    held = tl.load(flagged, mask=there[:, None] & (flag < bits)[None, :], other=0).to(tl.int32)
    held = tl.reshape(held << (tl.arange(0, OF.block) % 8)[:, None], [OF.block // 8, 8, OF.bit_tile])
    real = (flag < bits)[None, :] & (byte < size)[:, None]
    tl.store(index + flag[None, :] * size + byte[:, None], tl.sum(held, 1).to(tl.uint8), mask=real)


@triton.jit(do_not_specialize=["num_rows", "entries", "length"])  # every prompt's differ: none is compiled for
def pack_entries(
    key, key_b, key_h, key_n, value, value_b, value_h, value_n, table, order, rows, flags, counted, positions, fill,
    errors, num_rows, entries, length, bits, OF: tl.constexpr,
):  # fmt: skip
    """Write a stretch of what one head of one row stores of one kind; axes of the grid: row and head, stretch, kind."""
    row, head = (tl.program_id(0) // OF.heads).to(tl.int64), tl.program_id(0) % OF.heads
    kind, first = tl.program_id(2), tl.program_id(1) * OF.block
    own = table + (row * OF.kinds + kind) * FIELDS
    count = tl.load(own + AT.ENTRIES).to(tl.int32)
    if first < count:
        entry, column = first + tl.arange(0, OF.block), tl.arange(0, OF.tile)
        there, of_kind = entry < count, kind * num_rows + row
        place = tl.load(order + of_kind * entries + entry, mask=there, other=0)
        source = tl.load(rows + row * entries + place, mask=there, other=0)
        sample, of_sample = row // OF.per_sample, row % OF.per_sample + head
        stands = (head * count + entry).to(tl.int64)
        width, channel = OF.width, column
        if OF.cut:
            width, cut = tl.load(own + AT.KEY_WIDTH).to(tl.int32), tl.load(own + AT.CHANNELS)
            listed = cut.to(tl.pointer_type(tl.uint8)) + head * width + column
            listed = tl.load(listed, mask=(cut != 0) & (column < width), other=0).to(tl.int32)
            channel = tl.where(cut != 0, listed, column)
        from_key = key + sample * key_b + of_sample * key_h + source * key_n
        mask = there[:, None] & (column < width)[None, :]
        vectors = tl.load(from_key[:, None] + channel[None, :], mask=mask, other=0)
        _store(
            vectors, mask, tl.load(own + AT.KEYS), tl.load(own + AT.KEY_SCALES), stands[:, None], there[:, None],
            stands, there, width, errors + (row * OF.heads + head) * OF.width * OF.width, 0, OF,
        )  # fmt: skip
        from_value = value + sample * value_b + of_sample * value_h + source * value_n
        starts, index, into = tl.load(own + AT.STARTS), tl.load(own + AT.FLAGS), tl.load(own + AT.POSITIONS)
        if starts == 0:
            mask = there[:, None] & (column < OF.width)[None, :]
            vectors = tl.load(from_value[:, None] + column[None, :], mask=mask, other=0)
            _store(
                vectors, mask, tl.load(own + AT.VALUES), tl.load(own + AT.VALUE_SCALES), stands[:, None],
                there[:, None], stands, there, OF.width, errors, 1, OF,
            )  # fmt: skip
        elif OF.routed:
            _store_pieces(
                own, starts, flags, counted, fill, from_value, row, head, of_kind, place, stands, there, entries,
                bits, OF,
            )  # fmt: skip
        if (head == 0) & (index != 0):
            size, at = tl.load(own + AT.FLAG_BYTES).to(tl.int32), index.to(tl.pointer_type(tl.uint8))
            _store_flags(at, size, flags, row, first, place, there, entries, bits, OF)
        if (head == 0) & (into != 0):
            found = tl.load(positions + row * length + source, mask=there, other=0)
            tl.store(into.to(tl.pointer_type(tl.int32)) + entry, found, mask=there)


Made = make_dataclass(
    "Made", [
        "kinds", "heads", "per_sample", "width", "piece", "cut", "routed", "filled", "fed", "how",
        "block", "tile", "piece_count", "piece_tile", "bit_tile",
    ], frozen=True,
)  # fmt: skip
"""Tells the kernel sizes, what there is, how parts are rounded, sizes of tiles (powers of 2)."""


def launch_packing(layer: Any, form: Format, table: Tensor, pieces: int, routed: int, most: int) -> None:
    """Write a layer's entries, ``_Rows`` of ``cache/pack.py``, where the table says.

    The first ``routed`` kinds store ``pieces`` of a head; a row stores ``most`` entries of a kind at most.
    """
    key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (layer.keys_RcNd, layer.values_RcNd))
    marks_KRM, flags = torch.stack([kind.marks_RM for kind in layer.kinds]), layer.flags_RSM
    (batch, kv_heads, length, width), (kinds, rows, entries), bits = key.shape, marks_KRM.shape, 0
    order = marks_KRM.int().sort(dim=-1, descending=True, stable=True).indices
    counted = table  # stands where nothing is read
    if flags is not None and routed:
        flags, bits = flags.contiguous(), flags.shape[1]
        counted = (flags & marks_KRM[:routed, :, None]).cumsum(-1, dtype=torch.int32)
    beside = flags, counted, layer.position_RN, layer.fill_Rc1d, layer.feedback_Rcdd
    heads, cut = batch * kv_heads // rows, layer.channels_Rck is not None
    own = kinds, heads, kv_heads // heads, width, width // pieces, cut, routed > 0, *(x is not None for x in beside[3:])
    made, warps = made_for(form, own, bits)
    with torch.cuda.device(key.device) if key.is_cuda else nullcontext():  # where Triton launches
        pack_entries[(rows * heads, -(-most // made.block), kinds)](
            key, *key.stride()[:3], value, *value.stride()[:3], table, order, layer.own_RM.contiguous(),
            *(table if x is None else x.contiguous() for x in beside), rows, entries, length, bits, made,
            num_warps=warps,
        )  # fmt: skip


def made_for(form: Format, own: tuple[int, ...], bits: int) -> tuple[Any, int]:
    """Return a ``Made`` of its first numbers, and the warps of a program."""
    width, piece, block = own[3], own[4], max(ENTRIES, form.run)
    how = form.rounding("keys", width), form.rounding("values", width), form.rounding("pieces", piece)
    tiles = [next_power_of_2(size) for size in (max(2, width), width // piece, max(2, piece), max(1, bits))]
    return Made(*own, how, block, *tiles), 4 * block // ENTRIES
