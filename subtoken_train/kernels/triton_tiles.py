"""Tiles of the fused kernels: queries, stored keys and values (rounded ones brought back), scores, running softmax.

Triton; every function runs inside a kernel. Shapes: r query rows, n entries, m channels, p pieces of w channels.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_queries(
    query, query_b, query_h, query_q, sample, head, row, channel, real, new,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Query rows ``row`` [r] of a key-value head, new tokens fastest, in channels ``channel`` [m], [r, m]."""
    own = query + sample * query_b + (head * GROUP + row // new) * query_h + row % new * query_q
    return tl.load(own[:, None] + channel[None, :], mask=(row < GROUP * new)[:, None] & real[None, :], other=0)


@triton.jit
def _unpacked(codes, place):
    """The 4-bit codes at places ``place`` of a vector, two a byte, low half first, in fp32."""
    return (((codes.to(tl.int32) >> (place % 2 * 4)) & 15) - 8).to(tl.float32)


@triton.jit
def load_vectors(data, scales, vector, inside, channel, real, width, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """Vectors ``vector`` [n] in channels ``channel`` [m], [n, m] in DTYPE; rounded ones as ``Payload.read`` reads."""
    mask, vector = inside[:, None] & real[None, :], vector.to(tl.int64)
    if BITS == 0:
        return tl.load(data + vector[:, None] * width + channel[None, :], mask=mask, other=0).to(DTYPE)
    scale = tl.load(scales + vector, mask=inside, other=0).to(tl.float32)[:, None]
    if BITS == 4:
        codes = tl.load(data + vector[:, None] * (width // 2) + channel[None, :] // 2, mask=mask, other=0)
        return tl.where(mask, _unpacked(codes, channel[None, :]) * scale, 0.0).to(DTYPE)
    codes = tl.load(data + vector[:, None] * width + channel[None, :], mask=mask, other=0)
    return (codes.to(tl.float32) * scale).to(DTYPE)


@triton.jit
def load_pieces(data, scales, number, stored, within, WIDTH: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """Pieces ``number`` [n, p] of entries that store them, [n, p, w] in DTYPE, 0 where they do not."""
    there, number = stored != 0, number.to(tl.int64)
    mask, place = there[:, :, None] & (within < WIDTH)[None, None, :], within[None, None, :]
    if BITS == 0:
        return tl.load(data + number[:, :, None] * WIDTH + place, mask=mask, other=0).to(DTYPE)
    scale = tl.load(scales + number, mask=there, other=0).to(tl.float32)[:, :, None]
    if BITS == 4:
        codes = tl.load(data + number[:, :, None] * (WIDTH // 2) + place // 2, mask=mask, other=0)
        return tl.where(mask, _unpacked(codes, place) * scale, 0.0).to(DTYPE)
    codes = tl.load(data + number[:, :, None] * WIDTH + place, mask=mask, other=0)
    return (codes.to(tl.float32) * scale).to(DTYPE)


@triton.jit
def stored_scores(
    asked, keys, scales, vector, inside, channel, stored, width, positions, entry, own, window, scale,
    BITS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Scores [r, n] of one tile of stored keys, and which of its entries each query row sees, [r, n] or [1, n]."""
    key = load_vectors(keys, scales, vector, inside, channel, stored, width, BITS, asked.dtype)
    scores = tl.dot(asked, tl.trans(key), input_precision="ieee") * scale
    seen = inside[None, :]
    if WINDOW:
        stands = tl.load(positions + entry, mask=inside, other=0)
        seen = seen & (own[:, None] - stands[None, :] < window)
    return scores, seen


@triton.jit
def running_softmax(scores, seen, peak, total, sums):
    """Weights of one more tile, and the running maximum, total and sums brought to its scale (base 2)."""
    scores = tl.where(seen, scores, float("-inf"))
    highest = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(highest == float("-inf"), 0.0, highest)  # nothing seen so far: no NaN
    weights, shrink = tl.exp2(scores - base[:, None]), tl.exp2(peak - base)
    return weights, highest, total * shrink + tl.sum(weights, 1), sums * shrink[:, None]


@triton.jit
def value_channels(WIDTH: tl.constexpr, PIECE: tl.constexpr, PIECE_COUNT: tl.constexpr, PIECE_TILE: tl.constexpr):
    """Value channels in the order of a tile's columns, piece by piece, and which columns are any."""
    column = tl.arange(0, PIECE_COUNT * PIECE_TILE)
    channel = column // PIECE_TILE * PIECE + column % PIECE_TILE
    return channel, (column % PIECE_TILE < PIECE) & (channel < WIDTH)
