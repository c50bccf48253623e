"""A packed cache as named tensors and a plain record, and back: nothing of it is unpacked or rounded again.

Reading is strict: no tensor is missing or beside, and what points into something (rows, channels, offsets, indices)
stays inside it, as kernels look nothing up twice.

Legend: B batch, h key-value heads, R rows of a block, c heads of a row, M entries of a part, d head width, k channels
of a cut key, n stored pieces, P pieces of an entry (or pages), S bits of an entry.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from subtoken_train.cache.cache import PackedCache
from subtoken_train.cache.key_basis import BalancedBasis, KeyBasis, MirroredBasis
from subtoken_train.errors import MAX_TOKENS, check_range, refuse
from subtoken_train.functional.gather import on_device
from subtoken_train.kernels.formats import MODEL, Format, Part, Payload
from subtoken_train.kernels.storage import Block, BlockPart, Fill, PageIndex, RoutedValues, pack_bits, unpack_bits

_NAMED = 3


def check_within(name: str, numbers: Tensor, below: int) -> None:
    """Refuse numbers outside of 0 to ``below - 1``."""
    outside = numbers.numel() and not (int(numbers.min()) >= 0 and int(numbers.max()) < below)
    refuse((outside, f"tensor {name} holds numbers outside of 0 to {below - 1:,}"))


def check_rows(place: str, blocks: Sequence[Block], batch: int, kv_heads: int) -> None:
    """Refuse blocks that do not hold every row of a layer exactly once (rows: samples, or heads of samples)."""
    heads = {block.heads for block in blocks}
    uneven = f"{place}: its blocks have rows of {sorted(heads)} heads; all must have 1, or {kv_heads}"
    refuse((len(heads) != 1 or not heads <= {1, kv_heads}, uneven))
    total = batch if heads == {kv_heads} else batch * kv_heads
    whole = list(range(total))
    named = [whole if block.rows is None else block.rows.tolist() for block in blocks]
    fits = all(len(own) == block.num_rows and own == sorted(own) for own, block in zip(named, blocks, strict=True))
    held_once = fits and sorted(row for own in named for row in own) == whole
    refuse((not held_once, f"{place}: its blocks do not hold each of the {total} rows once, in order"))


def checked_routed(
    place: str, index: Tensor | None, pieces: Payload, offsets: Tensor, piece_bit: Tensor, sizes: tuple[int, int, int]
) -> RoutedValues:
    """Return values whose index finds each stored piece exactly once; one of earlier versions' places becomes bits."""
    (rows, heads, entries), stored = sizes, len(pieces.data)
    counts = torch.cat([offsets.long(), torch.tensor([stored])]).diff()
    undivided = not len(counts) or int(offsets[0]) != 0 or bool((counts < 0).any())
    refuse((undivided, f"{place}: offsets do not divide {stored} stored pieces"))
    if index is not None and index.dtype == torch.int32:
        head = torch.arange(rows)[:, None] * heads + torch.arange(len(piece_bit)) // (len(piece_bit) // heads)
        bag_n = torch.arange(len(counts)).repeat_interleave(counts)
        unlike = f"{place}: an index of shape {list(index.shape)} does not fit {stored} pieces"
        refuse((index.shape != bag_n.shape, unlike))
        entry_n = index.long() - head.flatten()[bag_n] * entries
        check_within(f"{place}.index", entry_n, entries)
        flags = torch.zeros(len(counts), entries, dtype=torch.bool)
        flags[bag_n, entry_n] = True
        ascending = torch.equal(flags.nonzero()[:, 1], entry_n)
        refuse((not ascending, f"{place}: an index must name ascending entries of each piece"))
        index, piece_bit = pack_bits(flags.view(rows, -1, entries)), torch.arange(len(piece_bit), dtype=torch.int32)
    check_within(f"{place}.piece_bit", piece_bit, len(piece_bit) if index is None else index.shape[1])
    partly = index is None and not set(counts.tolist()) <= {0, entries}
    refuse((partly, f"{place}: pieces that some entries store and others do not need an index"))
    if index is not None:
        unlike = f"{place}: an index of shape {list(index.shape)} does not fit {entries} entries"
        refuse((index.shape[::2] != (rows, -(-entries // 8)), unlike))
        flags_RSM = unpack_bits(index, entries)
        found = flags_RSM.index_select(1, piece_bit).sum(-1).flatten()
        agree = torch.equal(pack_bits(flags_RSM), index) and torch.equal(found, counts)
        refuse((not agree, f"{place}: index and offsets disagree on what is stored"))
    return RoutedValues(index, pieces, offsets, piece_bit, entries, heads)


def check_pages(place: str, pages: PageIndex, parts: Sequence[BlockPart]) -> None:
    """Refuse a page index that does not fit one part that is stored whole."""
    number = pages.low.shape[2]
    fits = (
        len(parts) == 1
        and not parts[0].cut
        and len(parts[0].payloads[1].data.shape) == 4
        and pages.high.shape == pages.low.shape
        and pages.size > 0
        and 0 <= pages.count < number
        and pages.size * number <= parts[0].entries
        and int(pages.forced.sum(-1).max()) <= pages.count
    )
    refuse((not fits, f"{place}: its page index does not fit its entries"))


@dataclass(frozen=True)
class PartRecord:
    """Record of a ``BlockPart``: if values are routed, keys cut, both in the model's dtype; if pieces have an index."""

    routed: bool
    cut: bool
    plain: bool = False
    indexed: bool = True


@dataclass(frozen=True)
class BlockRecord:
    """Record of a ``Block``: whether it names its rows, its parts, entries of a page and pages of a step."""

    rows: bool
    parts: list[PartRecord]
    page_size: int | None = None
    page_count: int | None = None


@dataclass(frozen=True)
class LayerRecord:
    """Record of a ``PackedLayer``; its fill is ``stored`` by the cache, a ``weight`` of the model, or None."""

    blocks: list[BlockRecord]
    fill: Literal["stored", "weight"] | None = None
    turned: bool = False


@dataclass(frozen=True)
class PackedRecord:
    """Record of a ``PackedCache``; ``prompt_length`` counts tokens of the unreduced prompts, padding included."""

    prompt_length: int
    layers: list[LayerRecord]


@dataclass(frozen=True)
class PackedShape:
    """Shape of a model's cache; ``axes`` of a position id: 1 or 3 (mRoPE); ``mirrors`` of cut keys' basis, or 0."""

    batch: int
    kv_heads: int
    width: int
    dtype: torch.dtype
    form: Format
    windows: list[int | None]
    axes: int
    mirrors: int = 0


def packed_tensors(cache: PackedCache) -> tuple[PackedRecord, dict[str, Tensor]]:
    """Return a filled cache, to which nothing was appended, as a record and its own tensors."""
    assert cache.evictor is None
    assert cache.next_position is not None
    tensors = {"next_position": cache.next_position}
    layers = []
    for number, layer in enumerate(cache.layers):
        assert layer.tail_length == layer.settled_length == 0
        blocks = [_write_block(f"{number}.{i}.", block, tensors) for i, block in enumerate(layer.blocks)]
        if (fill := layer.fill) is not None:
            tensors[f"{number}.fill"] = fill.vectors_Bhd if fill.stored else fill.vectors_Bhd[:1]
        if layer.basis is not None:
            tensors |= {f"{number}.basis.{name}": tensor for name, tensor in layer.basis.stored.items()}
        turned = isinstance(layer.basis, MirroredBasis)
        layers.append(LayerRecord(blocks, None if fill is None else "stored" if fill.stored else "weight", turned))
    return PackedRecord(cache.prompt_length, layers), {name: each.contiguous() for name, each in tensors.items()}


def _write_block(place: str, block: Block, tensors: dict[str, Tensor]) -> BlockRecord:
    pages = block.pages
    beside, parts = {"rows": block.rows, "channels": block.channels}, list[PartRecord]()
    if pages is not None:
        beside |= {"pages.low": pages.low, "pages.high": pages.high, "pages.forced": pages.forced}
    for i, part in enumerate(block.parts):
        for name, payload in zip(("keys", "values"), part.payloads, strict=True):
            beside |= {f"{i}.{name}": payload.data, f"{i}.{name}.scale": payload.scale}
        beside[f"{i}.position"] = part.position_RM
        values, routed = part.values, isinstance(part.values, RoutedValues)
        if isinstance(values, RoutedValues):
            beside |= {f"{i}.{name}": getattr(values, name) for name in ("index", "offsets", "piece_bit")}
        indexed = isinstance(values, Payload) or values.index is not None
        parts.append(PartRecord(routed, part.cut, not part.keys.format.rounds, indexed))
    tensors.update({place + name: tensor for name, tensor in beside.items() if tensor is not None})
    return BlockRecord(block.rows is not None, parts, *((None, None) if pages is None else (pages.size, pages.count)))


def packed_cache(
    record: PackedRecord, tensors: Mapping[str, Tensor], shape: PackedShape, devices: list[torch.device]
) -> PackedCache:
    """Build a cache from its record and tensors; ``devices`` are the layers' (the positions go to the first)."""
    if len(record.layers) != len(shape.windows):
        raise ValueError(f"it has {len(record.layers)} layers, and the model {len(shape.windows)}")
    check_range("prompt_length", record.prompt_length, 1, MAX_TOKENS)
    reader, cache = _CacheReader(tensors, shape), PackedCache(len(record.layers))
    position = reader.take("next_position", (torch.int64,), *(() if shape.axes == 1 else (shape.axes,)), shape.batch, 1)
    check_within("next_position", position, MAX_TOKENS)
    for number, (own, layer, device) in enumerate(zip(record.layers, cache.layers, devices, strict=True)):
        layer.window = shape.windows[number]
        blocks = [reader.block(f"{number}.{i}.", block, layer.window is not None) for i, block in enumerate(own.blocks)]
        check_rows(f"layer {number}", blocks, shape.batch, shape.kv_heads)
        fill, basis = reader.fill(f"{number}.fill", own.fill), reader.basis(f"{number}.basis", own.turned)
        like = torch.empty(shape.batch, shape.kv_heads, 0, shape.width, dtype=shape.dtype, device=device)
        beside = on_device(fill, device), on_device(basis, device)
        layer.store_prompt(on_device(blocks, device), record.prompt_length, like, *beside)
    reader.check_all_taken()
    cache.next_position = position.to(devices[0])
    cache.origin_B = torch.arange(shape.batch, device=devices[0])
    for layer in cache.layers:
        if layer.window is not None:
            layer.begin_tail(cache.next_position[:, 0])
    return cache


class _CacheReader:
    """Builds a cache's parts from its tensors, each taken once and checked; what does not fit is a ``ValueError``."""

    def __init__(self, tensors: Mapping[str, Tensor], shape: PackedShape) -> None:
        self._left, self._shape = dict(tensors), shape

    def take(self, name: str, dtypes: tuple[torch.dtype, ...], *shape: int | None) -> Tensor:
        """Take a tensor of one of the dtypes and of a shape (None: any number); of any shape where none is given."""
        refuse((name not in self._left, f"tensor {name} is missing"))
        if (tensor := self._left.pop(name)).dtype not in dtypes:
            found, *wanted = (str(dtype).removeprefix("torch.") for dtype in (tensor.dtype, *dtypes))
            raise ValueError(f"tensor {name} is of {found}; it must be of {' or '.join(wanted)}")
        fits = tensor.dim() == len(shape) and all(a in (None, b) for a, b in zip(shape, tensor.shape, strict=True))
        if shape and not fits:
            words = ", ".join("any" if size is None else str(size) for size in shape)
            raise ValueError(f"tensor {name} has shape {list(tensor.shape)}; it must be [{words}]")
        wide = tensor.float() if tensor.dtype == torch.float8_e4m3fn else tensor  # which isfinite does not take
        refuse((tensor.is_floating_point() and not bool(wide.isfinite().all()), f"tensor {name} holds NaN or infinity"))
        return tensor

    def check_all_taken(self) -> None:
        """Refuse tensors that are left."""
        if self._left:
            names = [name[:80] for name in sorted(self._left)[:_NAMED]]
            raise ValueError(f"{len(self._left)} tensors are not expected: {names}")

    def fill(self, name: str, kind: str | None) -> Fill | None:
        shape = self._shape
        if kind is None:
            return None
        if kind == "stored":
            return Fill(self.take(name, (shape.dtype,), shape.batch, shape.kv_heads, shape.width), True)
        weight = self.take(name, (torch.float32, shape.dtype), 1, shape.kv_heads, shape.width)
        return Fill(weight.expand(shape.batch, -1, -1), False)

    def basis(self, name: str, turned: bool) -> KeyBasis | None:
        shape = self._shape
        refuse((turned and not shape.mirrors, f"{name} is of keys that are cut along axes, and no key_axes are set"))
        if not shape.form.rotates and not turned:
            return None
        lead, half = (shape.batch, shape.kv_heads), (torch.float16,)
        centre = self.take(f"{name}.centre", half, *lead, 1, shape.width)
        if turned:
            mirrors = self.take(f"{name}.mirrors", half, *lead, shape.width, shape.mirrors)
            joint = self.take(f"{name}.joint", (torch.float32,), *lead, shape.mirrors, shape.mirrors)
            return MirroredBasis(centre, mirrors, joint)
        size = self.take(f"{name}.size", half, *lead, 1, shape.width)
        refuse((not bool((size > 0).all()), f"tensor {name}.size must hold positive numbers"))
        return BalancedBasis(centre, size)

    def block(self, place: str, record: BlockRecord, windowed: bool) -> Block:
        refuse((not record.parts, f"{place[:-1]}: a block without a part"))
        shape, channels = self._shape, None
        rows = self.take(f"{place}rows", (torch.int64,), None) if record.rows else None
        if any(part.cut for part in record.parts):
            kind = torch.uint8 if shape.width <= 256 else torch.int16
            channels = self.take(f"{place}channels", (kind,), None, None, None)
            check_within(f"{place}channels", channels, shape.width)
            if not channels.shape[2] or not bool((channels.long().diff(dim=-1) > 0).all()):
                raise ValueError(f"tensor {place}channels must hold ascending numbers of channels")
        parts = [self.part(f"{place}{i}.", part, channels, windowed) for i, part in enumerate(record.parts)]
        heads = parts[0].keys.data.shape[:2]
        beside = [part.keys.data for part in parts] + ([] if channels is None else [channels])
        refuse((any(each.shape[:2] != heads for each in beside), f"{place[:-1]}: its parts are of different rows"))
        pages = None
        if record.page_size is not None or record.page_count is not None:
            low = self.take(f"{place}pages.low", (shape.dtype,), *heads, None, shape.width)
            high = self.take(f"{place}pages.high", (shape.dtype,), *low.shape)
            forced = self.take(f"{place}pages.forced", (torch.bool,), heads[0], low.shape[2])
            pages = PageIndex(record.page_size or 0, record.page_count or 0, low, high, forced)
            check_pages(place[:-1], pages, parts)
        return Block(rows, parts, channels, pages)

    def part(self, place: str, record: PartRecord, channels: Tensor | None, windowed: bool) -> BlockPart:
        shape, form = self._shape, MODEL if record.plain else self._shape.form
        width = shape.width if channels is None or not record.cut else channels.shape[2]
        keys = self.payload(f"{place}keys", (None, None, None), width, form, "keys")
        rows, heads, entries = keys.data.shape[:3]
        refuse((entries % form.run, f"{place[:-1]}: {entries} entries do not fill runs of {form.run}"))
        refuse((not rows or not heads, f"{place[:-1]}: keys of {rows} rows and {heads} heads"))
        position = self.take(f"{place}position", (torch.int32,), rows, entries) if windowed else None
        if position is not None:
            check_within(f"{place}position", position, MAX_TOKENS)
        if not record.routed:
            values = self.payload(f"{place}values", (rows, heads, entries), shape.width, form, "values")
            return BlockPart(keys, values, record.cut, position)
        piece_bit = self.take(f"{place}piece_bit", (torch.int32,), None)
        pieces = len(piece_bit)
        if not pieces or pieces % heads or shape.width % (pieces // heads):
            raise ValueError(f"{place[:-1]}: {pieces} pieces do not divide {heads} heads of width {shape.width}")
        numbers = self.numbers(f"{place}values", (None,), shape.width * heads // pieces, form)
        scale = self.scale(f"{place}values", (rows, heads, entries), shape.width, form, "pieces")
        offsets = self.take(f"{place}offsets", (torch.int32,), rows * pieces)
        index = self.take(f"{place}index", (torch.int32, torch.uint8)) if record.indexed else None
        if index is not None and index.dim() != (1 if index.dtype == torch.int32 else 3):
            raise ValueError(f"{place[:-1]}: an index of shape {list(index.shape)} does not fit {entries} entries")
        stored, sizes = Payload(numbers, scale, shape.dtype, form), (rows, heads, entries)
        found = checked_routed(place[:-1], index, stored, offsets, piece_bit, sizes)
        return BlockPart(keys, found, record.cut, position)

    def payload(self, name: str, lead: tuple[int | None, ...], width: int, form: Format, part: Part) -> Payload:
        data = self.numbers(name, lead, width, form)
        return Payload(data, self.scale(name, data.shape[:-1], width, form, part), self._shape.dtype, form)

    def numbers(self, name: str, lead: tuple[int | None, ...], width: int, form: Format) -> Tensor:
        form.check_width(width, f"{name} has {width} channels")
        return self.take(name, (form.code_dtype(self._shape.dtype),), *lead, form.code_width(width))

    def scale(self, name: str, lead: Sequence[int], width: int, form: Format, part: Part) -> Tensor | None:
        if not form.rounds:
            return None
        return self.take(f"{name}.scale", (torch.float16,), *form.scale_shape(lead, width, part))
