"""Packed keys and values of one layer, and all that attention reads of it beside them: tail, window and fill.

A *block* holds the entries of some rows of the cache that have equally many of each *part*: of entries that are stored
alike. A row is a sample with all its heads where heads share their entries (c = h), else one head of one sample (c =
1). Nothing is padded. A value slice of one head is cut into P / c *pieces* of w channels, the largest that a group mask
never cuts. How many are stored is known on the host: no shape depends on data.

Legend: h key-value heads, R rows of a block, c heads of a row, M entries of a part, d head width (of a payload: its
stored width), S bits of an entry, P pieces of an entry in all heads of the row (or pages), w channels of a piece, n
stored pieces (or pages read), b bytes of all (row, piece), k channels of a cut key, B batch, q new tokens (the newest
last), G query rows of a key-value head (tokens fastest), X = B * h, T places of the tail's room, N = all entries of a
row and its tail.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from subtoken_train.kernels.formats import Payload

_tables: dict[torch.device, tuple[Tensor, Tensor]] = {}
"""By device: of every byte the number of bits that are set; and of (byte, k) the place of its k-th set bit. 1.3 KB."""


def pack_bits(flags_RSM: Tensor) -> Tensor:
    """Pack eight flags a byte, the first in the lowest bit, uint8 [R, S, ceil(M / 8)]."""
    places = torch.arange(8, dtype=torch.uint8, device=flags_RSM.device)
    padded_RSM = torch.nn.functional.pad(flags_RSM.to(torch.uint8), (0, -flags_RSM.shape[-1] % 8))
    packed: Tensor = (padded_RSM.view(*padded_RSM.shape[:2], -1, 8) << places).sum(-1, dtype=torch.uint8)
    return packed


def unpack_bits(packed_RSm: Tensor, entries: int) -> Tensor:
    """Return the flags of ``pack_bits``, bool [R, S, M]."""
    places = torch.arange(8, dtype=torch.uint8, device=packed_RSm.device)
    return (packed_RSm[..., None] >> places & 1).bool().flatten(-2)[..., :entries]


def prepare_bits(device: torch.device) -> None:
    """Build the tables of a device once, before a step reads them."""
    if device not in _tables:
        bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
        nth = (1 - bits).sort(dim=1, stable=True).indices
        _tables[device] = bits.sum(1, dtype=torch.int32), nth.to(torch.uint8).flatten()


def places_in_bits(packed_RSm: Tensor, piece_bit: Tensor, heads: int, entries: int, stored: int) -> Tensor:
    """Return (row * c + head) * M + entry of each stored piece, by row, piece and entry, int32 [n]."""
    device, (rows, _, per_piece) = packed_RSm.device, packed_RSm.shape
    count_256, nth = _tables[device]
    byte_b = packed_RSm.index_select(1, piece_bit).flatten().int()
    count_b = count_256.index_select(0, byte_b)
    owner_n = torch.repeat_interleave(count_b, output_size=stored)
    # of byte and rank among its set bits: the stored pieces before a byte are taken off their own numbers
    key_b = (byte_b << 3) + count_b - count_b.cumsum(0, dtype=torch.int32)
    key_n = key_b.index_select(0, owner_n).add_(torch.arange(stored, dtype=torch.int32, device=device))
    first_entry = torch.arange(0, 8 * per_piece, 8, dtype=torch.int32, device=device)
    head = torch.arange(rows * heads, dtype=torch.int32, device=device)[:, None, None]
    first_b = (head * entries + first_entry).expand(-1, len(piece_bit) // heads, -1).reshape(-1)
    return first_b.index_select(0, owner_n).add_(nth.index_select(0, key_n))


@dataclass
class PageIndex:
    """Index of whole pages of consecutive entries, of which a step reads ``count``; the rest is always read."""

    size: int
    count: int
    low: Tensor  # least value of each key channel in a page, [R, c, P, d]
    high: Tensor  # greatest, alike
    forced: Tensor  # pages that are always read, bool [R, P], at most ``count`` of each row

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, all of which a step reads."""
        return self.low.nbytes + self.high.nbytes + self.forced.nbytes


@dataclass
class RoutedValues:
    """Values of routed entries: the stored pieces, piece by piece of every row, and their index."""

    index: Tensor | None
    """uint8 [R, S, ceil(M / 8)]: bit i % 8 of byte i // 8 is set where entry i stores what the bit stands for; None:
    every piece is stored by all of a row's entries or by none."""
    pieces: Payload
    """[n, w], by row, then piece, then entry; a head's entry has one scale, [R, c, M, 1(, 2 with its zero point)]."""
    offsets: Tensor  # where each (row, piece) starts in ``pieces``, int32 [R * P]
    piece_bit: Tensor  # which of the S bits rules each of a row's P pieces, int32 [P]
    entries: int
    heads: int
    bounds: list[int] = field(default_factory=list)  # the offsets and n, on the host

    def __post_init__(self) -> None:
        if not self.bounds:
            self.bounds = [*self.offsets.tolist(), len(self.pieces.data)]
        if self.index is not None:
            prepare_bits(self.index.device)

    def places(self) -> Tensor:
        """Return (row * c + head) * M + entry of each stored piece, int32 [n], in the order of ``pieces``."""
        if self.index is None:
            per_head, count, device = len(self.piece_bit) // self.heads, self.entries, self.offsets.device
            stored = (bag // per_head * count for bag, (start, end) in enumerate(pairwise(self.bounds)) if end > start)
            whole = [torch.arange(first, first + count, dtype=torch.int32, device=device) for first in stored]
            return torch.cat(whole or [self.offsets[:0]])
        return places_in_bits(self.index, self.piece_bit, self.heads, self.entries, len(self.pieces.data))

    def read(self, part: slice = slice(None), places_n: Tensor | None = None) -> Tensor:
        """Return stored pieces in the model's dtype, [n, w]; ``places_n`` is ``places()``, where it is known."""
        own, scale = self.pieces, None
        if own.scale is not None:
            scale = own.scale.flatten(0, 2).index_select(0, (self.places() if places_n is None else places_n)[part])
        return Payload(own.data[part], scale, own.dtype, own.format).read()

    @property
    def index_bytes(self) -> int:
        """Bytes of the index, the offsets and the piece map."""
        return (0 if self.index is None else self.index.nbytes) + self.offsets.nbytes + self.piece_bit.nbytes


@dataclass
class BlockPart:
    """Entries of a block that are stored alike: [R, c, M, d] (cut keys of the block's ``channels``)."""

    keys: Payload
    values: Payload | RoutedValues
    cut: bool = False
    position_RM: Tensor | None = None

    @property
    def entries(self) -> int:
        """Entries of each row, M."""
        return self.keys.entries

    @property
    def payloads(self) -> list[Payload]:
        """Keys and values, as they are stored."""
        return [self.keys, self.values.pieces if isinstance(self.values, RoutedValues) else self.values]

    @property
    def index_bytes(self) -> int:
        """Bytes of the pieces' index and of the positions."""
        places = 0 if self.position_RM is None else self.position_RM.nbytes
        return places + (self.values.index_bytes if isinstance(self.values, RoutedValues) else 0)


@dataclass
class Block:
    """Entries of rows with equal counts."""

    rows: Tensor | None
    """int64 [R]: sample numbers where heads share entries, else sample * h + head; None: all rows, in order."""
    parts: list[BlockPart]  # one or more, possibly without entries; all have the same R and c
    channels: Tensor | None = None
    """Numbers of the key channels that cut keys keep, ascending, uint8 (int16 for heads of more than 256) [R, c, k]."""
    pages: PageIndex | None = None  # of the only part, stored whole: what one new token reads of it; None: all
    numbers: list[int] | None = None  # the rows on the host
    layout: object = field(default=None, init=False, repr=False, compare=False)  # of ``native.py``

    def __post_init__(self) -> None:
        if self.numbers is None and self.rows is not None:
            self.numbers = self.rows.tolist()

    @cached_property
    def in_full(self) -> Self:
        """The block without pages: every entry is read."""
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
        """All parts' keys and values, as they are stored."""
        return [payload for part in self.parts for payload in part.payloads]

    @property
    def index_bytes(self) -> int:
        """Bytes of the pieces' index, positions, pages, and the numbers of rows and key channels."""
        beside = sum(0 if x is None else x.nbytes for x in (self.rows, self.channels, self.pages))
        return sum(part.index_bytes for part in self.parts) + beside

    @property
    def unread_bytes(self) -> int:
        """Bytes of the pages that one new token does not choose."""
        if self.pages is None:
            return 0
        entries = self.pages.size * (self.pages.low.shape[2] - self.pages.count)
        return sum(payload.nbytes for payload in self.payloads) * entries // self.parts[0].entries


def dense_keys(part: BlockPart, block: Block, width: int) -> Tensor:
    """Return a part's keys, [R, c, M, d] with d = ``width``, in the model's dtype."""
    keys = part.keys.read()
    if not part.cut:
        return keys
    assert block.channels is not None
    return keys.new_zeros(*keys.shape[:3], width).scatter(3, block.channels.long()[:, :, None].expand_as(keys), keys)


def dense_values(part: BlockPart) -> Tensor:
    """Return a part's values, [R, c, M, d], in the model's dtype."""
    values = part.values
    if isinstance(values, Payload):
        return values.read()
    flags_RPM, pieces = stored_flags(values), values.read()
    dense = pieces.new_zeros(*flags_RPM.shape, pieces.shape[-1])
    dense[flags_RPM] = pieces
    return dense.view(len(dense), values.heads, -1, part.entries, pieces.shape[-1]).transpose(2, 3).flatten(3)


def stored_flags(values: RoutedValues) -> Tensor:
    """Mark the pieces that each entry stores, bool [R, P, M]."""
    if values.index is not None:
        return unpack_bits(values.index, values.entries).index_select(1, values.piece_bit)
    held = torch.tensor(values.bounds, device=values.offsets.device).diff() > 0
    return held.view(-1, len(values.piece_bit), 1).expand(-1, -1, values.entries)


def read_pages(block: Block, query_RcGd: Tensor) -> Block:
    """Return a block of the entries that one new token reads; every head chooses its own pages."""
    pages, (part,) = block.pages, block.parts
    assert pages is not None
    assert isinstance(part.values, Payload)
    entry_Rcn = chosen_pages(pages, query_RcGd)[..., None] * pages.size
    entry_RcM = (entry_Rcn + torch.arange(pages.size, device=entry_Rcn.device)).flatten(2)
    whole = pages.low.shape[2] * pages.size
    left = part.entries - whole
    rows, heads = (torch.arange(size, device=entry_RcM.device) for size in entry_RcM.shape[:2])
    places = rows[:, None, None], heads[:, None], entry_RcM
    chosen = BlockPart(part.keys.each(lambda x: x[places]), part.values.each(lambda x: x[places]))
    left_over = BlockPart(part.keys.narrow(2, whole, left), part.values.narrow(2, whole, left))
    return Block(block.rows, [chosen, left_over], numbers=block.numbers)


def chosen_pages(pages: PageIndex, query_RcGd: Tensor) -> Tensor:
    """Choose pages for every head, int64 [R, c, n], by Quest's bound in fp32 (else many tie); forced ones first."""
    query = query_RcGd.float()
    positive_Rcd, negative_Rcd = query.clamp(min=0).mean(2), query.clamp(max=0).mean(2)
    bound_RcP = page_bound(positive_Rcd, negative_Rcd, pages.low.float(), pages.high.float())
    bound_RcP = bound_RcP.masked_fill(pages.forced[:, None], torch.inf)
    return bound_RcP.sort(dim=-1, descending=True, stable=True).indices[..., : pages.count]


def page_bound(positive_Rcd: Tensor, negative_Rcd: Tensor, low_RcPd: Tensor, high_RcPd: Tensor) -> Tensor:
    """Bound each page by sum_d max(q_d * low_d, q_d * high_d), [R, c, P], unscaled, from q above and below 0."""
    bound_RcP = torch.einsum("rcd,rcpd->rcp", positive_Rcd, high_RcPd)
    return bound_RcP + torch.einsum("rcd,rcpd->rcp", negative_Rcd, low_RcPd)


@dataclass(frozen=True)
class Tail:
    """Keys and values appended since the prompt, in full and causal; later places hold finite numbers."""

    room_keys_BhTd: Tensor
    room_values_BhTd: Tensor
    length: int
    start_B: Tensor | None = None  # first real token of each sample where tails are padded on the left
    written: Tensor | None = None
    """Is read instead of ``length``, int64 [1] on the device, where all steps have one shape."""

    @property
    def keys(self) -> Tensor:
        """Keys that are there, [B, h, T, d]; under ``written`` the whole room."""
        return self._there(self.room_keys_BhTd)

    @property
    def values(self) -> Tensor:
        """Values that are there, likewise."""
        return self._there(self.room_values_BhTd)

    def _there(self, room_BhTd: Tensor) -> Tensor:
        return room_BhTd if self.written is not None else room_BhTd.narrow(2, 0, self.length)

    def own_places(self, new: int) -> Tensor:
        """Return the places of the new tokens, int64 [q]."""
        offsets = torch.arange(new, device=self.room_keys_BhTd.device)
        return offsets + (self.length - new if self.written is None else self.written - new)


@dataclass(frozen=True)
class CacheWindow:
    """Sliding window over a cache: so many positions, its own included; ``first_B``: of the first tail places."""

    size: int
    first_B: Tensor

    def of_rows(self, rows: Tensor | None, heads: int = 1) -> "CacheWindow":
        """Return the window of a block's rows (None: all rows): samples, or ``heads`` heads of each."""
        first_R = self.first_B if heads == 1 else self.first_B.repeat_interleave(heads)
        return CacheWindow(self.size, first_R if rows is None else first_R[rows])

    def hidden(self, block: Block, tail: int, own_q: Tensor, columns: int) -> Tensor:
        """Mark what the window hides from the query rows of a block, bool [R, 1, N, G]."""
        first_R1 = self.first_B[:, None]
        places_T = torch.arange(tail, device=first_R1.device)
        stored = [part.position_RM for part in block.parts if part.position_RM is not None]
        position_RN = torch.cat([*stored, first_R1 + places_T], 1)
        own_RG = first_R1 + own_q.repeat(columns // len(own_q))
        return (own_RG[:, None, None] - position_RN[:, None, :, None]) >= self.size


@dataclass(frozen=True)
class Fill:
    """Value vector per sample in place of pieces not stored: a ``stored`` one, or a weight's view of [1, h, d]."""

    vectors_Bhd: Tensor
    stored: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the vectors that the cache holds."""
        return self.vectors_Bhd.nbytes if self.stored else 0

    def select(self, samples: Tensor) -> "Fill":
        """Return the fill of chosen samples, int64, in their order."""
        if not self.stored:
            return Fill(self.vectors_Bhd[:1].expand(len(samples), -1, -1), False)
        return Fill(self.vectors_Bhd.index_select(0, samples.to(self.vectors_Bhd.device)), True)

    def of_heads(self, dtype: torch.dtype) -> Tensor:
        """Return the vectors by heads of samples, [X, 1, d]."""
        return self.vectors_Bhd.to(dtype).flatten(0, 1)[:, None]

    def of_rows(self, heads: int, dtype: torch.dtype) -> Tensor:
        """Return the vectors by rows of ``heads`` heads, [R, c, 1, d]."""
        return self.vectors_Bhd.to(dtype).reshape(-1, heads, 1, self.vectors_Bhd.shape[-1])
