"""Packed keys and values of one layer, as attention reads them.

A *block* holds the entries of some rows of the cache that have equally many of each *part*: of entries that are stored
alike (a routed one in pieces, another whole). A row is a sample with all its
heads where heads share their entries (c = h), else one head of one sample (c = 1). Nothing is padded: rows of other
lengths are in other blocks. A value slice of one head is cut into P / c *pieces* of w channels, the largest pieces that
a group mask never cuts; ``bits`` says which pieces of a routed entry are stored.

Legend: h key-value heads, R rows of a block, c heads of a row, M entries of a part, d head width, S bits of
an entry, P pieces of an entry in all heads of the row, w channels of a piece, n stored pieces, k channels of a cut key.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from subtoken_train.kernels.bit_index import places_in_bits, prepare_bits
from subtoken_train.kernels.page_index import PageIndex

CHUNK = 2**20  # bytes of codes that are read back at a time, as fp32 into one room: fewer calls, and no new pages


@dataclass
class Payload:
    """Vectors of the last axis in the model's dtype, or as integers with one scale per vector.

    Attributes:
        data: [..., d]; int8 codes, or (4 bits) uint8 [..., d / 2] with two codes a byte, low half first.
        scale: [..., 1] in fp16; None where ``data`` is in the model's dtype.
        dtype: what ``read`` returns.
    """

    data: Tensor
    scale: Tensor | None
    dtype: torch.dtype

    @staticmethod
    def store(vectors: Tensor, bits: int = 0) -> Payload:
        """Store vectors as they are (``bits`` 0), or rounded to 8 or 4 bits with symmetric scales.

        Raises:
            ValueError: 4 bits for vectors of an odd width.
        """
        if not bits:
            return Payload(vectors.contiguous(), None, vectors.dtype)
        top = 2 ** (bits - 1) - 1
        # a scale that fp16 flushes to 0 would divide by it
        scale = (vectors.float().abs().amax(-1, keepdim=True) / top).clamp(min=2**-24).half()
        codes = (vectors.float() / scale.float()).round().clamp(-top, top).to(torch.int8)
        if bits == 4:
            if codes.shape[-1] % 2:
                raise ValueError(
                    f"int4 stores two channels a byte, but the value groups cut heads into pieces of {codes.shape[-1]} "
                    "channels; take kv_dtype int8, or fewer groups"
                )
            codes = (codes + 8).to(torch.uint8)
            codes = codes[..., ::2] | codes[..., 1::2] << 4
        return Payload(codes, scale, vectors.dtype)

    def read(self) -> Tensor:
        """The vectors in the model's dtype; the stored tensor itself where nothing is rounded."""
        if self.scale is None:
            return self.data
        codes = self.data
        if codes.dtype == torch.uint8:
            codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).to(torch.int8) - 8
        return (codes.float() * self.scale.float()).to(self.dtype)

    def narrow(self, axis: int, start: int, length: int) -> Payload:
        """A view of a stretch along an axis other than the last."""
        scale = None if self.scale is None else self.scale.narrow(axis, start, length)
        return Payload(self.data.narrow(axis, start, length), scale, self.dtype)

    def select(self, index: Tensor) -> Payload:
        """Entries of the first axis, copied."""
        return Payload(self.data[index], None if self.scale is None else self.scale[index], self.dtype)

    @property
    def entries(self) -> int:
        """Vectors of each head, where the axes are [R, c, M, d]."""
        return self.data.shape[2]

    @property
    def stretch(self) -> int:
        """Of these, how many are read at a time: all where reading copies nothing."""
        rows, heads, entries, width = self.data.shape
        return entries if self.scale is None else max(1, CHUNK // (rows * heads * width))

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return self.data.nbytes + (0 if self.scale is None else self.scale.nbytes)


@dataclass
class RoutedValues:
    """Values of routed entries: the stored pieces, piece by piece of every row, and what finds their entries.

    Attributes:
        index: one of two forms, whichever ``cache/pack.py`` chose. ``int32 [n]``: for each stored piece the place
            (row * c + head) * M + entry of the probability that weighs it. ``uint8 [R, S, ceil(M / 8)]``: bit i % 8 of
            byte i // 8 is set where entry i stores what the bit stands for; smaller, and decoded in every step.
        pieces: payload [n, w], ordered by row, then piece, then entry.
        offsets: where each (row, piece) starts in ``pieces``, int32 [R * P].
        piece_bit: which of the S bits rules each of a row's P pieces, int32 [P].
        entries: M.
        heads: c.
        bounds: the offsets and n, on the host: read from the device once where they are not given, not in every step.
    """

    index: Tensor
    pieces: Payload
    offsets: Tensor
    piece_bit: Tensor
    entries: int
    heads: int
    bounds: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.bounds:
            self.bounds = [*self.offsets.tolist(), len(self.pieces.data)]
        if self.index.dtype == torch.uint8:
            prepare_bits(self.index.device)

    def places(self) -> Tensor:
        """The place of every stored piece's probability, int32 [n], in the order of ``pieces``."""
        if self.index.dtype == torch.int32:
            return self.index
        return places_in_bits(self.index, self.piece_bit, self.heads, self.entries, len(self.pieces.data))

    @property
    def index_bytes(self) -> int:
        """Bytes of the index; offsets and the piece map do not grow with the entries and are counted too."""
        return self.index.nbytes + self.offsets.nbytes + self.piece_bit.nbytes


def places_of(flags_RPM: Tensor, heads: int, count: int) -> Tensor:
    """(row * c + head) * M + entry of every stored piece, int64 [n], from what is stored, n of them."""
    _, pieces, entries = flags_RPM.shape
    stored = torch.nonzero_static(flags_RPM.flatten(), size=count).squeeze(1)
    per_head = pieces // heads * entries
    return stored.div(per_head, rounding_mode="floor") * entries + stored % entries


@dataclass
class BlockPart:
    """Entries of a block that are stored alike.

    Attributes:
        keys: payload [R, c, M, d]; where they are cut, only of the block's ``channels``.
        values: payload [R, c, M, d] where entries keep all of their value, else their stored pieces.
        cut: whether the keys are cut.
        position_RM: of every entry, int32, where the layer has a window; None: every new token sees all entries.
        halves: the keys of a part of one head as two halves of ceil(M / 2), which share an entry where M is odd; views.
            None where there is not one head, nothing to halve, or where keys are rounded.
    """

    keys: Payload
    values: Payload | RoutedValues
    cut: bool = False
    position_RM: Tensor | None = None
    halves: Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        data, self.halves = self.keys.data, None
        length, width = data.shape[2:]
        if self.keys.scale is None and data.shape[:2] == (1, 1) and length > 1:
            half = -(-length // 2)
            self.halves = data.as_strided((2, half, width), ((length - half) * width, width, 1))

    @property
    def entries(self) -> int:
        """Entries of each row, M."""
        return self.keys.entries

    @property
    def payloads(self) -> list[Payload]:
        """What is stored of keys and values."""
        return [self.keys, self.values.pieces if isinstance(self.values, RoutedValues) else self.values]

    @property
    def index_bytes(self) -> int:
        """Bytes of what finds the stored pieces, and of the positions."""
        places = 0 if self.position_RM is None else self.position_RM.nbytes
        return places + (self.values.index_bytes if isinstance(self.values, RoutedValues) else 0)


@dataclass
class Block:
    """Entries of rows with equal counts.

    Attributes:
        rows: which rows of the cache these are, int64 [R]: sample numbers where heads share entries, else
            sample * h + head; None where the block holds all rows, in order.
        parts: one or more, possibly without entries; all have the same R and c. Attention sums them.
        channels: numbers of the key channels that cut keys keep, ascending, uint8 (int16 for heads of more than 256)
            [R, c, k]; None where no part is cut.
        pages: of the only part, which is stored whole: what one new token reads of it; None: all.
        numbers: the rows on the host, read from the device once; None where ``rows`` is.
    """

    rows: Tensor | None
    parts: list[BlockPart]
    channels: Tensor | None = None
    pages: PageIndex | None = None
    numbers: list[int] | None = None

    def __post_init__(self) -> None:
        if self.numbers is None and self.rows is not None:
            self.numbers = self.rows.tolist()

    @cached_property
    def in_full(self) -> Block:
        """The same without pages: every entry is read."""
        return self if self.pages is None else replace(self, pages=None)

    @property
    def num_rows(self) -> int:
        """Rows that the block holds, R."""
        return self.parts[0].keys.data.shape[0]

    @property
    def heads(self) -> int:
        """Heads of a row, c."""
        return self.parts[0].keys.data.shape[1]

    @property
    def payloads(self) -> list[Payload]:
        """What is stored of all parts' keys and values."""
        return [payload for part in self.parts for payload in part.payloads]

    @property
    def index_bytes(self) -> int:
        """Bytes of what finds the stored pieces, of positions, pages, and the numbers of rows and key channels."""
        beside = sum(0 if x is None else x.nbytes for x in (self.rows, self.channels, self.pages))
        return sum(part.index_bytes for part in self.parts) + beside

    @property
    def unread_bytes(self) -> int:
        """Bytes that one new token does not read: keys and values of the pages that it does not choose."""
        if self.pages is None:
            return 0
        entries = self.pages.size * (self.pages.low.shape[2] - self.pages.count)
        return sum(payload.nbytes for payload in self.payloads) * entries // self.parts[0].entries
