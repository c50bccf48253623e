"""Table of a layer's packed entries for the fused kernels: addresses of rows, and the stretches of programs.

Made when a layer is packed, and anew by the first step after its blocks changed. A *stretch* is a run of entries of one
row; its program leaves sums in a *slot* per head, and all slots of a head are joined at the end.

Legend: B batch, h key-value heads, R rows of a block, c heads of a row, M entries of a part, P pieces of a row, J
stretches of a row, S flags of an entry.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from subtoken_train.kernels.formats import CHANNELS, FORMATS, Payload
from subtoken_train.kernels.storage import Block, BlockPart, Fill, RoutedValues, pack_bits, stored_flags, unpack_bits


class Field(IntEnum):
    """Columns of ``RowTable.rows``, int64; addresses are those of the row's first head. 0: there is none."""

    KEYS = 0
    KEY_SCALES = 1  # of each entry, or of each run
    KEY_WIDTH = 2  # channels of a stored key
    CHANNELS = 3  # their numbers, where keys are cut
    VALUES = 4  # where values are routed, of the part's first piece
    VALUE_SCALES = 5  # of each entry: all its pieces share it
    FLAGS = 6  # uint8 [S, FLAG_BYTES]
    FLAG_BYTES = 7
    PIECE_BIT = 8  # int32 [P]
    STARTS = 9  # int32 [P, J]: the first stored piece of each stretch
    STRETCHES = 10  # J
    POSITIONS = 11  # int32 [M]
    ENTRIES = 12  # M
    SAMPLE = 13
    HEAD = 14  # the row's first head
    SLOTS = 15  # of each of its heads
    FILL = 16  # of the row's first head, where values are routed and pieces that are not stored read as something
    FILL_STEP = 17  # bytes from head to head


SHORTEST = 128  # entries of a stretch, at least
PROGRAMS = 4  # programs for each multiprocessor, about

_CODES = [each.code_dtype(torch.float32) for each in FORMATS.values() if each.bits in each.triton]
DTYPES = (torch.float32, torch.float16, torch.bfloat16, *_CODES)  # dtypes that the kernels read


class Alike(NamedTuple):
    """Tell how entries of some stretches are stored, for which kernels are compiled; dtypes by place in ``DTYPES``."""

    bits: int = 0
    shared: int = 0
    """Channels of a value that share a scale and a zero point, as the keys of a run do; 0: every vector has a scale."""
    key_dtype: int = 0
    value_dtype: int = 0

    @classmethod
    def of(cls, part: BlockPart, width: int) -> Self:
        """Return how a part is stored, whose heads have ``width`` channels."""
        keys, values = part.payloads
        assert keys.format.bits == values.format.bits
        shared = math.gcd(width, CHANNELS) if keys.format.run > 1 else 0
        return cls(keys.format.bits, shared, DTYPES.index(keys.data.dtype), DTYPES.index(values.data.dtype))


@dataclass
class RowTable:
    """A layer's packed entries, as addresses."""

    rows: Tensor
    items: Tensor  # (row, first entry, number of the stretch, slot of the row's first head) of each, int32 [n, 4]
    owners: Tensor  # (first slot, slots) of each head of each sample, int32 [B * h, 2]
    launches: list[tuple[Alike, Tensor]]  # how items are stored, and those that are stored so; they lie together
    stretch: int
    slots: int
    heads: int
    piece: int  # channels of a value piece; the head's width where nothing is routed
    aligned: int  # bytes, up to 16, that all keys' and values' addresses are multiples of
    cut: bool
    fill_dtype: torch.dtype | None = None
    held: list[object] = field(default_factory=list, repr=False)  # the blocks, and what was made of them, kept alive
    nbytes: int = 0  # of the table, without the blocks

    @property
    def room(self) -> tuple[Any, ...]:
        """Return what a launch depends on beside the tensors' contents; ``padded`` tables of equal rooms are alike."""
        items = tuple((alike, _rounded_up(len(own))) for alike, own in self.launches)
        sizes = _rounded_up(len(self.rows) + 1), _rounded_up(self.slots + 1), len(self.owners)
        return *sizes, items, self.stretch, self.heads, self.piece, self.aligned, self.cut, self.fill_dtype

    def padded(self) -> Self:
        """Copy the table into its ``room``; further items read a row without entries, and write a slot of nobody."""
        rows, slots, *_ = self.room
        idle = torch.tensor([rows - 1, 0, 0, slots - 1], dtype=torch.int32).to(self.items.device)
        filled = [torch.cat([own, idle.expand(_rounded_up(len(own)) - len(own), 4)]) for _, own in self.launches]
        items = torch.cat(filled)
        parts = torch.split(items, list(map(len, filled)))
        launches = [(alike, own) for (alike, _), own in zip(self.launches, parts, strict=True)]
        more, owners = torch.nn.functional.pad(self.rows, (0, 0, 0, rows - len(self.rows))), self.owners.clone()
        size = more.nbytes + items.nbytes + owners.nbytes
        return replace(
            self, rows=more, items=items, owners=owners, launches=launches, slots=slots, held=[], nbytes=size
        )

    def take(self, other: Self) -> None:
        """Copy what another table of the same ``room`` says; that one keeps alive what is read."""
        own = other.padded()
        for held, new in ((self.rows, own.rows), (self.items, own.items), (self.owners, own.owners)):
            held.copy_(new)

    def rest(self) -> None:
        """Say, in a ``padded`` table, that nothing is read."""
        self.items.copy_(torch.tensor([len(self.rows) - 1, 0, 0, self.slots - 1]))
        self.owners.zero_()


def _rounded_up(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()


def unserved(blocks: Sequence[Block], query_BHqd: Tensor) -> str | None:
    """Say in words why the fused kernels cannot read these blocks; None: they can."""
    new, width = query_BHqd.shape[2:]
    if width > 256:
        return f"heads of {width} channels (up to 256)"
    if query_BHqd.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"{query_BHqd.dtype}"
    if new == 1 and any(block.pages is not None for block in blocks):
        return "pages that each step chooses"
    forms = [payload.format for block in blocks for payload in block.payloads]
    return next((f"kv_dtype {form.name}" for form in forms if form.bits not in form.triton), None)


def row_table(blocks: Sequence[Block], batch: int, kv_heads: int, width: int, fill: Fill | None = None) -> RowTable:
    """Build the table of a layer's blocks; nothing is read from the device."""
    parts = [(block, part) for block in blocks for part in block.parts if part.entries]
    heads = blocks[0].heads if blocks else kv_heads
    device = blocks[0].parts[0].keys.data.device if blocks else torch.device("cpu")
    total = sum(part.entries * block.num_rows * heads for block, part in parts)
    units = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    stretch = max(1, -(-total // (PROGRAMS * units * SHORTEST))) * SHORTEST  # enough of them to keep a device busy
    rows: list[list[int]] = []
    stored: list[Alike] = []
    stretches: list[list[tuple[int, int, int]]] = [[] for _ in range(batch * kv_heads // heads)]
    held: list[object] = [list(blocks), fill]
    for block, part in parts:
        columns = _columns(block, part, stretch, held)
        for place, number in enumerate(block.numbers or range(block.num_rows)):
            sample, head = divmod(number * heads, kv_heads)
            own = {Field.SAMPLE: sample, Field.HEAD: head}
            if fill is not None:
                vectors = fill.vectors_Bhd
                assert vectors.stride(2) == 1
                own[Field.FILL] = vectors[sample, head].data_ptr()
                own[Field.FILL_STEP] = vectors.stride(1) * vectors.element_size()
            stretches[number] += [(len(rows), first, j) for j, first in enumerate(range(0, part.entries, stretch))]
            stored.append(Alike.of(part, width))
            rows.append([own[f] if f in own else columns[f][0] + place * columns[f][1] for f in Field])
    items, owners, slots = _slots(rows, stretches, heads)
    items.sort(key=lambda item: stored[item[0]])  # launch by launch
    counts = Counter(stored[item[0]] for item in items) or {Alike(): 0}
    kinds = (rows, torch.int64, len(Field)), (items, torch.int32, 4), (owners, torch.int32, 2)
    tensors = [torch.tensor(made, dtype=dtype).view(-1, width).to(device) for made, dtype, width in kinds]
    routed = [part.values for _, part in parts if isinstance(part.values, RoutedValues)]
    made = [x for x in held if isinstance(x, Tensor)]
    return RowTable(
        rows=tensors[0],
        items=tensors[1],
        owners=tensors[2],
        launches=list(zip(counts, torch.split(tensors[1], [*counts.values()]), strict=True)),
        stretch=stretch,
        slots=slots,
        heads=heads,
        piece=width * heads // len(routed[0].piece_bit) if routed else width,
        aligned=math.gcd(16, *(row[f] for row in rows for f in (Field.KEYS, Field.VALUES))),
        cut=any(part.cut for _, part in parts),
        fill_dtype=None if fill is None else fill.vectors_Bhd.dtype,
        held=held,
        nbytes=sum(x.nbytes for x in [*tensors, *made]),
    )


def addresses(block: Block, part: BlockPart) -> dict[Field, tuple[int, int]]:
    """Return (first row's number, step from row to row) of all columns; those that a part has no word for are 0."""
    keys, values, scale = part.keys, part.values, part.payloads[1].scale
    own = dict.fromkeys(Field, (0, 0)) | {
        Field.KEYS: _of_rows(keys.data),
        Field.KEY_SCALES: _of_rows(keys.scale),
        Field.KEY_WIDTH: (keys.format.width(keys.data.shape[-1]), 0),
        Field.CHANNELS: _of_rows(block.channels if part.cut else None),
        Field.VALUE_SCALES: _of_rows(scale),
        Field.POSITIONS: _of_rows(part.position_RM),
        Field.ENTRIES: (part.entries, 0),
    }
    if isinstance(values, Payload):
        return own | {Field.VALUES: _of_rows(values.data)}
    return own | {
        Field.VALUES: (values.pieces.data.data_ptr(), 0),
        Field.FLAGS: _of_rows(values.index),
        Field.FLAG_BYTES: (-(-part.entries // 8), 0),
        Field.PIECE_BIT: (values.piece_bit.data_ptr(), 0),
        Field.STARTS: (values.offsets.data_ptr(), 4 * len(values.piece_bit)),
    }


def _of_rows(states: Tensor | None) -> tuple[int, int]:
    assert states is None or states.is_contiguous()
    return (0, 0) if states is None else (states.data_ptr(), states.nbytes // len(states))


def _columns(block: Block, part: BlockPart, stretch: int, held: list[object]) -> dict[Field, tuple[int, int]]:
    """Return ``addresses`` of a part that is read by stretches; tensors made for it go into ``held``."""
    values, own = part.values, addresses(block, part) | {Field.STRETCHES: (-(-part.entries // stretch), 0)}
    if isinstance(values, Payload):
        return own
    flags, piece_bit = values.index, values.piece_bit
    if flags is None:
        flags, piece_bit = pack_bits(stored_flags(values)), torch.arange(len(piece_bit), device=piece_bit.device).int()
        held += [flags, piece_bit]
        own |= {Field.FLAGS: _of_rows(flags), Field.PIECE_BIT: (piece_bit.data_ptr(), 0)}
    padded = torch.nn.functional.pad(unpack_bits(flags, part.entries), (0, -part.entries % stretch))
    counts_RSJ = padded.view(*padded.shape[:2], -1, stretch).sum(-1)
    before_RPJ = (counts_RSJ.cumsum(-1) - counts_RSJ).index_select(1, piece_bit)
    starts = (before_RPJ + values.offsets.view(len(padded), -1, 1)).int()  # the first piece that each stretch stores
    held.append(starts)
    return own | {Field.STARTS: _of_rows(starts)}


def _slots(
    rows: list[list[int]], stretches: list[list[tuple[int, int, int]]], heads: int
) -> tuple[list[list[int]], list[list[int]], int]:
    """Return items and owners of a ``RowTable`` and the number of slots; write the rows' ``SLOTS``."""
    items, owners, slots = [], [], 0
    for of_row in stretches:
        for number, (row, first, stretch) in enumerate(of_row):
            rows[row][Field.SLOTS] = len(of_row)
            items.append([row, first, stretch, slots + number])
        owners += [[slots + head * len(of_row), len(of_row)] for head in range(heads)]
        slots += heads * len(of_row)
    return items, owners, slots


@dataclass
class Workspace:
    """Scratch of the fused kernels, one buffer per device, which grows when a launch needs more."""

    held: dict[torch.device, Tensor] = field(default_factory=dict)

    def take(self, size: int, device: torch.device) -> Tensor:
        """Return ``size`` uninitialised fp32 numbers."""
        there = self.held.get(device)
        if there is None or len(there) < size:
            there = self.held[device] = torch.empty(size, dtype=torch.float32, device=device)
        return there[:size]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(x.nbytes for x in self.held.values())


@dataclass
class FusedState:
    """Fused kernels' state of one layer; its table is built on demand and dropped when the blocks change."""

    workspace: Workspace = field(default_factory=Workspace)
    table: RowTable | None = None

    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"table": None}

    def table_of(
        self, blocks: Sequence[Block], batch: int, kv_heads: int, width: int, fill: Fill | None = None
    ) -> RowTable:
        """Return the layer's table; arguments of ``row_table``."""
        if self.table is None:
            self.table = row_table(blocks, batch, kv_heads, width, fill)
        return self.table
