"""What the fused kernels read of stored keys and values: whole vectors or pieces, rounded ones brought back.

Triton; every function runs inside a kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
