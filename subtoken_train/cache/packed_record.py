"""A packed cache as named tensors and a plain record, and back: nothing of it is unpacked or rounded again.

Reading is strict: every tensor that the record calls for is there, of its dtype and shape, no other one is, and what
points into something (rows, channels, offsets, indices) stays inside it (``cache/packed_checks.py``).

A cache that evicts while tokens are decoded is not written, nor what can be made anew (tables of the fused kernels).

Legend: B batch, h key-value heads, R rows of a block, c heads of a row, M entries of a part, d head width, k channels
of a cut key, n stored pieces, P pieces of an entry (or pages).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from subtoken_train.cache.cache import PackedCache
from subtoken_train.cache.packed_checks import (
    TensorReader,
    check_channels,
    check_pages,
    check_routed,
    check_rows,
    check_within,
)
from subtoken_train.cache.packed_layer import PackedLayer
from subtoken_train.errors import MAX_TOKENS, check_range
from subtoken_train.functional.moving import on_device
from subtoken_train.kernels.fill import Fill
from subtoken_train.kernels.page_index import PageIndex
from subtoken_train.kernels.storage import Block, BlockPart, Payload, RoutedValues


@dataclass(frozen=True)
class PartRecord:
    """Of a ``BlockPart``: whether its values are routed, and its keys cut."""

    routed: bool
    cut: bool


@dataclass(frozen=True)
class BlockRecord:
    """Of a ``Block``: whether it names its rows, its parts, and its pages as (entries of each, pages of a step)."""

    rows: bool
    parts: list[PartRecord]
    page_size: int | None = None
    page_count: int | None = None


@dataclass(frozen=True)
class LayerRecord:
    """Of a ``PackedLayer``; ``fill``: ``stored`` by the cache, a ``weight`` of the model, or None."""

    blocks: list[BlockRecord]
    fill: Literal["stored", "weight"] | None = None


@dataclass(frozen=True)
class PackedRecord:
    """Of a ``PackedCache``.

    Attributes:
        prompt_length: tokens of the unreduced prompts, padding included.
        layers: in order.
    """

    prompt_length: int
    layers: list[LayerRecord]


@dataclass(frozen=True)
class PackedShape:
    """What a cache of a model is like.

    Attributes:
        batch: B.
        kv_heads: h.
        width: d.
        dtype: of the model.
        bits: of keys and values: 0 in the model's dtype, 8 or 4.
        windows: of every layer; None: it sees all.
        axes: of a position id: 1, or 3 under mRoPE.
    """

    batch: int
    kv_heads: int
    width: int
    dtype: torch.dtype
    bits: int
    windows: list[int | None]
    axes: int


def packed_tensors(cache: PackedCache) -> tuple[PackedRecord, dict[str, Tensor]]:
    """A filled cache, to which nothing was appended, as a record and tensors; these are the cache's own."""
    assert cache.evictor is None
    assert cache.next_position is not None
    tensors = {"next_position": cache.next_position}
    layers = []
    for number, layer in enumerate(cache.layers):
        assert isinstance(layer, PackedLayer)
        assert layer.tail_length == layer.settled_length == 0
        blocks = [_write_block(f"{number}.{i}.", block, tensors) for i, block in enumerate(layer.blocks)]
        filler = layer.filler
        if filler is not None:
            tensors[f"{number}.fill"] = filler.vectors_Bhd if filler.stored else filler.vectors_Bhd[:1]
        layers.append(LayerRecord(blocks, None if filler is None else "stored" if filler.stored else "weight"))
    return PackedRecord(cache.prompt_length, layers), {name: each.contiguous() for name, each in tensors.items()}


def _write_block(place: str, block: Block, tensors: dict[str, Tensor]) -> BlockRecord:
    pages = block.pages
    beside = {"rows": block.rows, "channels": block.channels}
    if pages is not None:
        beside |= {"pages.low": pages.low, "pages.high": pages.high, "pages.forced": pages.forced}
    for i, part in enumerate(block.parts):
        values = part.values
        routed = values if isinstance(values, RoutedValues) else None
        payloads = {"keys": part.keys, "values": part.payloads[1]}
        for name, payload in payloads.items():
            beside |= {f"{i}.{name}": payload.data, f"{i}.{name}.scale": payload.scale}
        beside[f"{i}.position"] = part.position_RM
        if routed is not None:
            beside |= {f"{i}.{name}": getattr(routed, name) for name in ("index", "offsets", "piece_bit")}
    tensors.update({place + name: tensor for name, tensor in beside.items() if tensor is not None})
    parts = [PartRecord(isinstance(part.values, RoutedValues), part.cut) for part in block.parts]
    sizes = (None, None) if pages is None else (pages.size, pages.count)
    return BlockRecord(block.rows is not None, parts, *sizes)


def packed_cache(
    record: PackedRecord, tensors: Mapping[str, Tensor], shape: PackedShape, devices: list[torch.device]
) -> PackedCache:
    """The inverse.

    Args:
        record: what there is.
        tensors: by name, on the CPU.
        shape: what the model's cache is like.
        devices: where every layer's tensors go; the positions go to the first.

    Raises:
        ValueError: tensors that the record does not call for, that are missing, or that cannot be a cache of ``shape``.
    """
    if len(record.layers) != len(shape.windows):
        raise ValueError(f"it has {len(record.layers)} layers, and the model {len(shape.windows)}")
    check_range("prompt_length", record.prompt_length, 1, MAX_TOKENS)
    reader, cache = TensorReader(tensors), PackedCache(len(record.layers))
    axes = () if shape.axes == 1 else (shape.axes,)
    position = reader.take("next_position", (torch.int64,), *axes, shape.batch, 1)
    check_within("next_position", position, MAX_TOKENS)
    for number, (own, layer, device) in enumerate(zip(record.layers, cache.layers, devices, strict=True)):
        assert isinstance(layer, PackedLayer)
        layer.window = shape.windows[number]
        blocks = [
            _read_block(f"{number}.{i}.", block, reader, shape, layer.window is not None)
            for i, block in enumerate(own.blocks)
        ]
        check_rows(f"layer {number}", blocks, shape.batch, shape.kv_heads)
        fill = _read_fill(f"{number}.fill", own.fill, reader, shape)
        like = torch.empty(shape.batch, shape.kv_heads, 0, shape.width, dtype=shape.dtype, device=device)
        layer.fill(on_device(blocks, device), record.prompt_length, like, on_device(fill, device))
    reader.check_all_taken()
    cache.next_position = position.to(devices[0])
    cache.origin_B = torch.arange(shape.batch, device=devices[0])
    for layer in cache.layers:
        if layer.window is not None:
            layer.begin_tail(cache.next_position[:, 0])
    return cache


def _read_fill(name: str, kind: str | None, reader: TensorReader, shape: PackedShape) -> Fill | None:
    if kind is None:
        return None
    if kind == "stored":
        return Fill(reader.take(name, (shape.dtype,), shape.batch, shape.kv_heads, shape.width), True)
    weight = reader.take(name, (torch.float32, shape.dtype), 1, shape.kv_heads, shape.width)
    return Fill(weight.expand(shape.batch, -1, -1), False)


def _read_block(place: str, record: BlockRecord, reader: TensorReader, shape: PackedShape, placed: bool) -> Block:
    """A block on the CPU; ``placed``: its entries have positions."""
    if not record.parts:
        raise ValueError(f"{place[:-1]}: a block without a part")
    rows = reader.take(f"{place}rows", (torch.int64,), None) if record.rows else None
    channels = None
    if any(part.cut for part in record.parts):
        kind = torch.uint8 if shape.width <= 256 else torch.int16
        channels = reader.take(f"{place}channels", (kind,), None, None, None)
        check_channels(f"{place}channels", channels, shape.width)
    parts = [
        _read_part(f"{place}{i}.", part, channels if part.cut else None, reader, shape, placed)
        for i, part in enumerate(record.parts)
    ]
    heads = parts[0].keys.data.shape[:2]
    wanted = [part.keys.data.shape[:2] for part in parts] + ([] if channels is None else [channels.shape[:2]])
    if any(each != heads for each in wanted):
        raise ValueError(f"{place[:-1]}: its parts are of different rows")
    pages = None
    if record.page_size is not None or record.page_count is not None:
        low = reader.take(f"{place}pages.low", (shape.dtype,), *heads, None, shape.width)
        high = reader.take(f"{place}pages.high", (shape.dtype,), *low.shape)
        forced = reader.take(f"{place}pages.forced", (torch.bool,), heads[0], low.shape[2])
        pages = PageIndex(record.page_size or 0, record.page_count or 0, low, high, forced)
        check_pages(place[:-1], pages, parts)
    return Block(rows, parts, channels, pages)


def _read_part(
    place: str, record: PartRecord, channels: Tensor | None, reader: TensorReader, shape: PackedShape, placed: bool
) -> BlockPart:
    width = shape.width if channels is None else channels.shape[2]
    keys = _read_payload(f"{place}keys", (None, None, None), width, reader, shape)
    rows, heads, entries = keys.data.shape[:3]
    if not rows or not heads:
        raise ValueError(f"{place[:-1]}: keys of {rows} rows and {heads} heads")
    position = reader.take(f"{place}position", (torch.int32,), rows, entries) if placed else None
    if position is not None:
        check_within(f"{place}position", position, MAX_TOKENS)
    if not record.routed:
        values = _read_payload(f"{place}values", (rows, heads, entries), shape.width, reader, shape)
        return BlockPart(keys, values, record.cut, position)
    piece_bit = reader.take(f"{place}piece_bit", (torch.int32,), None)
    pieces = len(piece_bit)
    if not pieces or pieces % heads or shape.width % (pieces // heads):
        raise ValueError(f"{place[:-1]}: {pieces} pieces do not divide {heads} heads of width {shape.width}")
    stored = _read_payload(f"{place}values", (None,), shape.width * heads // pieces, reader, shape)
    offsets = reader.take(f"{place}offsets", (torch.int32,), rows * pieces)
    index = reader.take(f"{place}index", (torch.int32, torch.uint8))
    check_routed(place[:-1], index, offsets, piece_bit, len(stored.data), (rows, heads, entries))
    return BlockPart(keys, RoutedValues(index, stored, offsets, piece_bit, entries, heads), record.cut, position)


def _read_payload(
    name: str, lead: tuple[int | None, ...], width: int, reader: TensorReader, shape: PackedShape
) -> Payload:
    kinds = {0: shape.dtype, 8: torch.int8, 4: torch.uint8}
    if shape.bits == 4 and width % 2:
        raise ValueError(f"{name}: {width} channels cannot lie two in a byte")
    data = reader.take(name, (kinds[shape.bits],), *lead, width // 2 if shape.bits == 4 else width)
    scale = reader.take(f"{name}.scale", (torch.float16,), *data.shape[:-1], 1) if shape.bits else None
    return Payload(data, scale, shape.dtype)
