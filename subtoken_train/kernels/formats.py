"""Formats of stored keys and values: one object says how vectors are stored, read, counted and named.

A new format is an object in a tuple above ``FORMATS``, its name in ``KVDtype`` of ``settings.py`` and a row of
``docs/formats.md``: packing, bytes, saved caches, flags and tests take it from there. A GPU writes it as its
``rounding`` says. Triton and C read it only where its class lists its bits (``triton``, ``native``), else torch does.
Only a new class needs more: ``tests/kernels/test_formats.py`` names its reference.

Shapes of payloads: [R, c, M, d] with R rows of a block, c heads of a row, M entries, d channels. The pieces of values
that are stored in part are [n, w], n pieces of w channels, whose scales are those of their entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from subtoken_train.settings import KVDtype

Part = Literal["keys", "values", "pieces"]

CHUNK = 2**20  # bytes of codes that are dequantised per call
SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
"""Shares of a rotated key's largest magnitude that its scale is tried with."""
LATEST = 32  # last entries of a row, at least, that a format with runs leaves in the model's dtype
CHANNELS = 32
"""Channels of a value that share a scale and a zero point in such a format; fewer where they do not divide a head."""


def places_of_pieces(stored_n: Tensor, per_head: int, entries: int) -> Tensor:
    """Return (row * c + head) * M + entry of pieces, from (row * P + piece) * M + entry; P / c are ``per_head``."""
    return stored_n.div(per_head * entries, rounding_mode="floor") * entries + stored_n % entries


@dataclass(frozen=True)
class Rounding:
    """Say how a part's numbers are rounded, as ``triton_pack.py`` is compiled for; with no bits they are not."""

    bits: int = 0  # of a code
    top: float = 0  # the largest magnitude, or the range of a block, in units of its scale
    zero: bool = False  # codes are counted from the least number of a block
    run: int = 1  # entries of a block
    block: int = 0  # channels of a block; 0: all of an entry's head that are stored
    mantissa: int = 0  # bits behind the point of codes that are floats; 0: integers
    inner: int = 0  # channels that have an e4m3 scale among the codes; 0: there is none
    shares: tuple[float, ...] = ()  # of the largest magnitude, of which the one that loses least sets the scale
    turns: int = 0  # codes are of a vector of length sqrt(d) turned by Hadamard's matrix of 2^turns channels
    edges: tuple[float, ...] = ()  # between their levels, times 2^(turns / 2) / sqrt(d)


@dataclass(frozen=True)
class Format:
    """A storage format. This one keeps the model's own dtype; formats that round override what differs."""

    name: KVDtype
    bits: int

    triton: ClassVar[tuple[int, ...]] = (0,)  # bits of a code that the decoding kernel reads in this class
    native: ClassVar[tuple[int, ...]] = (0,)  # bits that C reads, which takes all but 8 for 4; torch reads all
    rounds = False  # true where vectors are stored as integer codes with scales
    rotates = False  # true where a layer's keys, its tail's too, and its queries are put into a basis of their own
    mixes = False  # true where the channels of a stored key are mixed: none can be cut, and no page read by them
    run = 1  # consecutive entries of a head whose keys share scales
    left = 0  # first and last layers of a model that stay in its dtype, half of its layers at most
    zero, mantissa, inner = False, 0, 0  # as of ``Rounding``, and the next for keys
    shares: ClassVar[tuple[float, ...]] = ()

    @property
    def top(self) -> int:
        """Largest code."""
        return (1 << self.bits - (not self.zero)) - 1

    def block(self, width: int) -> int:
        """Return how many channels of a value share a scale."""
        return width

    def rounding(self, part: Part, width: int) -> Rounding:
        """Say how vectors, or pieces, of ``width`` channels are rounded: the packing kernel does what it says."""
        if not self.rounds:
            return Rounding()
        block, shares = self.block(width) % width if part == "values" else 0, self.shares if part == "keys" else ()
        return Rounding(self.bits, self.top, self.zero, 1, block, self.mantissa, self.inner, shares)

    @property
    def per_code(self) -> int:
        """Channels that fill whole stored numbers."""
        return 8 // math.gcd(8, self.bits) if self.rounds else 1

    def code_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of stored numbers in a model of ``dtype``."""
        return torch.uint8 if self.rounds else dtype

    def code_width(self, width: int) -> int:
        """Return how many numbers store a vector of ``width`` channels."""
        return width * self.bits // 8 + (width // self.inner if self.inner else 0) if self.rounds else width

    def width(self, code_width: int) -> int:
        """Return how many channels ``code_width`` stored numbers hold."""
        return code_width // self.code_width(self.per_code) * self.per_code

    def in_layer(self, layer: int, layers: int) -> Format:
        """Return the format of one of a model's layers."""
        return MODEL if min(layer, layers - 1 - layer) < min(self.left, layers // 2) else self

    def check_width(self, width: int, cut: str) -> None:
        """Raise a ``ValueError`` that ends in ``cut`` unless vectors of ``width`` fill whole stored numbers."""
        if width % self.per_code:
            stored = f"{self.per_code} channels in {self.code_width(self.per_code)} B"
            raise ValueError(f"{self.name} stores {stored}, but {cut}")

    def rounded(self, count: Tensor) -> Tensor:
        """Return how many of so many entries are stored in this format: the first; the others in the model's dtype."""
        return count

    def scale_shape(self, lead: Sequence[int], width: int, part: Part) -> tuple[int, ...]:
        """Return the shape of the scales of vectors, or of an entry's pieces; ``lead``: (R, c, M), or a count."""
        own = self.rounding(part, width)
        return *lead[:-1], lead[-1] // own.run, width // own.block if own.block else 1, *[2] * own.zero

    def bytes_of(self, count: int, width: int, dtype: torch.dtype, part: Part) -> int:
        """Return the bytes of so many keys or whole values, scales included; keys take those of their runs evenly."""
        run = self.rounding(part, width).run
        scales = count * math.prod(self.scale_shape((run,), width, part)) // run if self.rounds else 0
        return count * self.code_width(width) * self.code_dtype(dtype).itemsize + 2 * scales

    def store(self, vectors: Tensor, largest: Tensor | None = None) -> Payload:
        """Store vectors [..., d], rounded by magnitudes ``largest`` [..., 1] (None: their own)."""
        return Payload(vectors.contiguous(), None, vectors.dtype, self)

    def store_keys(self, keys: Tensor, feedback: Tensor | None = None) -> Payload:
        """Store keys [..., d]; ``feedback``: what a channel's error asks of those after it, [..., d, d], or None."""
        return self.store(keys)

    def store_pieces(self, pieces_nw: Tensor, stored_n: Tensor, sizes: tuple[int, int, int], per_head: int) -> Payload:
        """Store pieces at (row * P + piece) * M + entry, an entry's head together; ``sizes``: (R, c, M), P / c."""
        return self.store(pieces_nw)

    def read(self, payload: Payload) -> Tensor:
        """Return the vectors in the model's dtype; the stored tensor itself where nothing is rounded."""
        return payload.data


@dataclass(frozen=True)
class Symmetric(Format):
    """Symmetric integers of any bits, packed from the lowest bit up; one fp16 scale per vector."""

    rounds = True
    triton: ClassVar[tuple[int, ...]] = (4, 8)
    native: ClassVar[tuple[int, ...]] = (4, 8)

    def code_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.int8 if self.bits == 8 else torch.uint8

    def scale_of(self, largest: Tensor) -> Tensor:
        """Return the fp16 scales of vectors by their largest magnitudes."""
        return (largest.float() / self.top).clamp(min=2**-24).half()  # one that fp16 flushes to 0 would divide by it

    def store(self, vectors: Tensor, largest: Tensor | None = None) -> Payload:
        self.check_width(vectors.shape[-1], _pieces(vectors))
        scale = self.scale_of(vectors.abs().amax(-1, keepdim=True) if largest is None else largest)
        return Payload(self.coded(vectors.float() / scale.float()), scale, vectors.dtype, self)

    def coded(self, numbers: Tensor) -> Tensor:
        """Return what is stored of numbers in units of their scale."""
        codes = numbers.round().clamp(-self.top, self.top).to(torch.int8)
        return codes if self.bits == 8 else packed_codes((codes + self.top + 1).to(torch.uint8), self.bits)

    def decoded(self, data: Tensor) -> Tensor:
        """Return the numbers of ``coded``, fp32."""
        return (data if self.bits == 8 else unpacked_codes(data, self.bits).view(torch.int8).sub_(self.top + 1)).float()

    def store_pieces(self, pieces_nw: Tensor, stored_n: Tensor, sizes: tuple[int, int, int], per_head: int) -> Payload:
        place_n = places_of_pieces(stored_n, per_head, sizes[2])
        largest = pieces_nw.new_zeros(math.prod(sizes)).scatter_reduce_(0, place_n, pieces_nw.abs().amax(-1), "amax")
        return replace(self.store(pieces_nw, largest[place_n, None]), scale=self.scale_of(largest.view(*sizes, 1)))

    def read(self, payload: Payload) -> Tensor:
        assert payload.scale is not None
        return self.decoded(payload.data).mul_(payload.scale).to(payload.dtype)


@dataclass(frozen=True)
class Rotated(Symmetric):
    """``Symmetric`` on keys in a basis of their own, each with the scale of ``SHARES`` that loses least of it.

    With a feedback every channel takes up what those before it lost, as QuIP's LDLQ (Chee et al., 2023) and GPTQ do.
    """

    rotates = mixes = True
    shares = SHARES

    def scales_of(self, keys: Tensor) -> Tensor:
        """Return the fp16 scales that keys [..., d] are tried with, [..., choices]."""
        largest = keys.float().abs().amax(-1, keepdim=True)
        return torch.cat([self.scale_of(share * largest) for share in SHARES], -1)

    def store_keys(self, keys: Tensor, feedback: Tensor | None = None) -> Payload:
        due, wide, scales, top = keys.float().clone(), keys.float(), self.scales_of(keys), self.top
        tried = ((wide / scale).round().clamp(-top, top) * scale for scale in torch.split(scales.float(), 1, -1))
        lost = torch.stack([(found - wide).square().sum(-1) for found in tried], -1)
        scale = scales.gather(-1, lost.nan_to_num(torch.inf).argmin(-1, keepdim=True))  # fp16 may lack the scale
        for i in range(0 if feedback is None else wide.shape[-1] - 1):
            assert feedback is not None
            found = (due[..., i : i + 1] / scale).round().clamp(-top, top) * scale
            due[..., i + 1 :] -= (found - wide[..., i : i + 1]) * feedback[..., None, i + 1 :, i]
        return Payload(self.coded(due / scale), scale, keys.dtype, self)


@dataclass(frozen=True)
class Fp8(Symmetric):
    """Floats of a byte (e4m3, up to 448, to the nearest even) instead of integers."""

    top, mantissa = 448, 3
    triton = native = ()

    def code_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float8_e4m3fn

    def coded(self, numbers: Tensor) -> Tensor:
        return numbers.clamp(-self.top, self.top).to(torch.float8_e4m3fn)

    def decoded(self, data: Tensor) -> Tensor:
        return data.float()


@dataclass(frozen=True)
class NVFP4(Symmetric):
    """Blocks of 16 channels: floats of half a byte (e2m1, up to 6, to the nearest even), then their e4m3 scale.

    NVIDIA's has one more scale, fp32, for a whole tensor; here each vector has its own, fp16, whatever is beside it.
    """

    top, per_code, mantissa, inner = 6 * 448, 16, 1, 16
    triton = native = ()

    def coded(self, numbers: Tensor) -> Tensor:
        blocks = numbers.reshape(*numbers.shape[:-1], numbers.shape[-1] // 16, 16)  # there may be no vectors
        scale = (blocks.abs().amax(-1, keepdim=True) / 6).clamp(max=448).to(torch.float8_e4m3fn)
        own = (blocks / scale.float()).nan_to_num(0, 0, 0).clamp(-6, 6)  # a scale that e4m3 flushes to 0 divides by it
        size = own.abs()
        most = torch.where(size < 4, size.round() + 2, (size / 2).round() + 4)
        codes = (torch.where(size < 2, (2 * size).round(), most) + 8 * own.signbit()).to(torch.uint8).flatten(-2)
        return torch.cat([packed_codes(codes, 4), scale.view(torch.uint8).flatten(-2)], -1)

    def decoded(self, data: Tensor) -> Tensor:
        codes, scale = data.tensor_split([data.shape[-1] // 9 * 8], -1)
        said = unpacked_codes(codes, 4)  # 0 to 7: 0, 0.5, 1, 1.5, 2, 3, 4, 6; a table would be sent to the device
        size = (said & 7).float()
        size = torch.where(size < 4, size / 2, torch.where(size < 6, size - 2, 2 * size - 8))
        own = (size * (1 - 2.0 * (said >> 3))).view(*scale.shape, 16)
        return (own * scale.view(torch.float8_e4m3fn).float()[..., None]).flatten(-2)


@dataclass(frozen=True)
class AboveZero(Format):
    """Integers above a zero point, the block's least number; scale and zero point fp16, beside each other: [..., 2]."""

    rounds = zero = True

    def store(self, vectors: Tensor, largest: Tensor | None = None) -> Payload:
        *lead, width = vectors.shape
        block = self.block(width)
        low, high = vectors.reshape(*lead, width // block, block).aminmax(dim=-1)
        return self._stored(vectors, low, high)

    def store_pieces(self, pieces_nw: Tensor, stored_n: Tensor, sizes: tuple[int, int, int], per_head: int) -> Payload:
        place_n = places_of_pieces(stored_n, per_head, sizes[2])
        none = pieces_nw.new_zeros(math.prod(sizes))
        ends = zip(("amin", "amax"), pieces_nw.aminmax(dim=-1), strict=True)
        low, high = (none.scatter_reduce(0, place_n, end, how, include_self=False)[:, None] for how, end in ends)
        stored = self._stored(pieces_nw, low[place_n], high[place_n])
        return replace(stored, scale=_scales(low, high, self.top).view(*sizes, 1, 2))

    def _stored(self, vectors: Tensor, low: Tensor, high: Tensor) -> Payload:
        self.check_width(vectors.shape[-1], _pieces(vectors))
        scale = _scales(low, high, self.top)
        step, zero = _broadcast(scale)
        codes = ((_in_blocks(vectors, scale).float() - zero) / step).round().clamp(0, self.top).to(torch.uint8)
        return Payload(packed_codes(codes.reshape(vectors.shape), self.bits), scale, vectors.dtype, self)

    def read(self, payload: Payload) -> Tensor:
        assert payload.scale is not None
        codes, (step, zero) = unpacked_codes(payload.data, self.bits), _broadcast(payload.scale)
        return (_in_blocks(codes, payload.scale) * step + zero).to(payload.dtype).reshape(codes.shape)


@dataclass(frozen=True)
class Kivi(AboveZero):
    """Keys by channel, 32 entries together, values by entry, 32 channels together.

    KIVI (Liu et al., 2024; section 3 and ``quant/new_pack.py`` of the release), and the same in 8 bits. Of every head's
    kept entries all full runs before the last 32 are rounded, once, when the prompt is packed. Not theirs: what follows
    a prompt is never rounded, as a cache can be cropped; routed values share a zero point and scale per entry's head.
    """

    run, triton = 32, (2, 4, 8)

    def rounded(self, count: Tensor) -> Tensor:
        return (count - LATEST).clamp(min=0) // self.run * self.run

    def block(self, width: int) -> int:
        return math.gcd(width, CHANNELS)

    def rounding(self, part: Part, width: int) -> Rounding:
        return Rounding(self.bits, self.top, True, self.run, 1) if part == "keys" else super().rounding(part, width)

    def store_keys(self, keys: Tensor, feedback: Tensor | None = None) -> Payload:
        *lead, entries, width = keys.shape
        low, high = keys.reshape(*lead, entries // self.run, self.run, width).aminmax(dim=-2)
        return self._stored(keys, low, high)


@dataclass(frozen=True)
class TurboQuant(AboveZero):
    """Keys by their norm and the nearest levels of their rotated channels, each value by its own range.

    TurboQuant (Zandieh et al., 2025, arXiv 2504.19874) as vLLM ships it (#38479: ``turboquant_4bit_nc``, ``_3bit_nc``).
    A key of length 1, turned by a Hadamard matrix, has nearly normal channels of variance 1 / d: each takes the nearest
    of ``LEVELS``. What is read back has the key's norm (fp16) again. A value is not turned, and has one scale and zero
    point. The first two layers and the last two stay in the model's dtype. Not offered: 8-bit keys, QJL's residual bit.
    """

    mixes, left = True, 2

    def rounding(self, part: Part, width: int) -> Rounding:
        if part != "keys":
            return super().rounding(part, width)
        above, block = LEVELS[self.bits], width & -width
        middles = (sum(pair) / 2 * (block / width) ** 0.5 for pair in pairwise([*(-x for x in above[::-1]), *above]))
        return Rounding(self.bits, self.top, turns=block.bit_length() - 1, edges=tuple(middles))

    def store_keys(self, keys: Tensor, feedback: Tensor | None = None) -> Payload:
        self.check_width(keys.shape[-1], _pieces(keys))
        wide, levels = keys.float(), _levels(self.bits, keys.device)
        norm = wide.norm(dim=-1, keepdim=True)
        turned = _turned(F.normalize(wide, dim=-1)) * keys.shape[-1] ** 0.5
        codes = torch.bucketize(turned, (levels[1:] + levels[:-1]) / 2, out_int32=True, right=True)
        most = torch.finfo(torch.float16).max
        return Payload(packed_codes(codes.to(torch.uint8), self.bits), norm.clamp(max=most).half(), keys.dtype, self)

    def read(self, payload: Payload) -> Tensor:
        assert payload.scale is not None
        if payload.scale.dim() > payload.data.dim():
            return super().read(payload)
        own = _levels(self.bits, payload.data.device)[unpacked_codes(payload.data, self.bits).int()]
        return (_turned(F.normalize(own, dim=-1)) * payload.scale.float()).to(payload.dtype)


LEVELS = {3: (0.2451, 0.7560, 1.3439, 2.1520), 4: (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326)}
"""By bits: levels above 0 that err least for a standard normal number (Max, 1960, table I); those below mirror them."""


@lru_cache
def _levels(bits: int, device: torch.device) -> Tensor:
    above = torch.tensor(LEVELS[bits], device=device)
    return torch.cat([-above.flip(0), above])


@lru_cache
def hadamard(width: int, device: torch.device) -> Tensor:
    """Return Hadamard's orthogonal matrix, fp32 [width, width], in the largest blocks that divide it."""
    block = width & -width
    place = torch.arange(block)
    return torch.kron(torch.eye(width // block), (1 - 2 * parity(place[:, None] & place)) / block**0.5).to(device)


def parity(numbers: Tensor) -> Tensor:
    """Return 1 where an odd number of a number's bits is set, else 0; below 2^16."""
    for shift in (8, 4, 2, 1):
        numbers = numbers ^ numbers >> shift
    return numbers & 1


def _turned(vectors: Tensor) -> Tensor:
    with torch.autocast(vectors.device.type, enabled=False):
        return vectors @ hadamard(vectors.shape[-1], vectors.device)


def _scales(low: Tensor, high: Tensor, top: int) -> Tensor:
    """Return scale and zero point of blocks by their ends, fp16 [..., 2]; numbers that fp16 does not hold are cut."""
    most = torch.finfo(torch.float16).max
    zero = low.float().clamp(-most, most).half()
    step = ((high.float() - zero.float()) / top).clamp(2**-24, most).half()  # one that fp16 flushes to 0 divides
    return torch.stack([step, zero], -1)


def _broadcast(scale: Tensor) -> tuple[Tensor, ...]:
    """Return scales and zero points as they meet ``_in_blocks``, fp32 [..., M / a, 1, d / b, 1] each."""
    return tuple(each.unsqueeze(-2).unsqueeze(-1) for each in scale.float().unbind(-1))


def _in_blocks(vectors: Tensor, scale: Tensor) -> Tensor:
    """Return vectors [..., M, d] in blocks of a entries and b channels, [..., M / a, a, d / b, b]; scale [..., 2]."""
    (*lead, entries, width), (runs, parts) = vectors.shape, scale.shape[-3:-1]
    return vectors.reshape(*lead, runs, entries // max(1, runs), parts, width // parts)


def packed_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes below 2^bits of the last axis into bytes, the first in the lowest bits; uint8 both."""
    per_word, size = 8 // math.gcd(8, bits), bits // math.gcd(8, bits)
    words = codes[..., ::per_word].to(torch.uint8 if size == 1 else torch.int32, copy=True)
    for place in range(1, per_word):
        words |= codes[..., place::per_word].to(words.dtype) << bits * place
    if size == 1:
        return words
    return torch.stack([(words >> 8 * byte & 255).to(torch.uint8) for byte in range(size)], -1).flatten(-2)


def unpacked_codes(data: Tensor, bits: int) -> Tensor:
    """Return the codes of ``packed_codes``."""
    if bits == 8:
        return data
    size, mask = bits // math.gcd(8, bits), (1 << bits) - 1
    words = data if size == 1 else sum(data[..., byte::size].int() << 8 * byte for byte in range(size))
    assert isinstance(words, Tensor)
    parts = [words & mask, *(words >> shift & mask for shift in range(bits, 8 * size - bits, bits))]
    return torch.stack([*parts, words >> 8 * size - bits], -1).flatten(-2).to(torch.uint8)


def _pieces(vectors: Tensor) -> str:
    return f"the value groups cut heads into pieces of {vectors.shape[-1]} channels; use kv_dtype int8, or fewer groups"


MODEL = Format("model", 0)
_SYMMETRIC = Symmetric("int8", 8), Symmetric("int4", 4), Rotated("int4_rotated", 4)
_FLOATS = Fp8("fp8", 8), NVFP4("nvfp4", 4)
_ABOVE_ZERO = Kivi("int8_channel", 8), Kivi("kivi4", 4), Kivi("kivi2", 2)
_TURBO = TurboQuant("turboquant4", 4), TurboQuant("turboquant3", 3)
FORMATS: dict[KVDtype, Format] = {each.name: each for each in (MODEL, *_SYMMETRIC, *_FLOATS, *_ABOVE_ZERO, *_TURBO)}


@dataclass
class Payload:
    """Stored numbers, and the fp16 scales that they are read with (``Format.scale_shape``; None: not rounded)."""

    data: Tensor
    scale: Tensor | None
    dtype: torch.dtype
    format: Format

    def each(self, take: Callable[[Tensor], Tensor], of_scales: Callable[[Tensor], Tensor] | None = None) -> Payload:
        """Return what ``take`` makes of the numbers, and ``of_scales`` (None: ``take`` too) of the scales."""
        scale = None if self.scale is None else (of_scales or take)(self.scale)
        return replace(self, data=take(self.data), scale=scale)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return self.data.nbytes + (0 if self.scale is None else self.scale.nbytes)

    def read(self) -> Tensor:
        """Return the vectors of the last axis in the model's dtype."""
        return self.format.read(self)

    def narrow(self, axis: int, start: int, length: int) -> Payload:
        """Return a view of a stretch along an axis other than the last; of keys with runs, of whole ones."""
        run = 1 if self.scale is None else self.data.shape[axis] // max(1, self.scale.shape[axis])
        return self.each(lambda x: x.narrow(axis, start, length), lambda x: x.narrow(axis, start // run, length // run))

    @property
    def entries(self) -> int:
        """Vectors of each head, where the axes are [R, c, M, d]."""
        return self.data.shape[2]

    @property
    def stretch(self) -> int:
        """Entries that are read per call, in whole runs: all where reading copies nothing."""
        (rows, heads, entries, width), run = self.data.shape, self.format.run
        return entries if self.scale is None else max(1, CHUNK // (rows * heads * width * run)) * run


def concatenated(parts: Sequence[Payload], axis: int) -> Payload:
    """Join what is stored in one format along an axis; what is not rounded takes the first part's dtype."""
    first = parts[0]
    scales = [part.scale for part in parts if part.scale is not None]
    data = [part.data if part.format.rounds else part.data.to(first.dtype) for part in parts]
    return replace(first, data=torch.cat(data, axis), scale=torch.cat(scales, axis) if scales else None)
