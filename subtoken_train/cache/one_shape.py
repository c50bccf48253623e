"""Steps of one shape: tensors that stay where they are, which one cache after another moves into.

A step of one shape reads the whole room of the tails, with unwritten places hidden; how many tokens are written, and
where the next one stands, are numbers on the device. So one graph of it serves every token, and every cache that has
the same ``shape_of``: with the fused kernels entries are found by a table of addresses, which is a tensor too.

Legend: B batch, h key-value heads, T places of a tail's room, d head width.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import fields, replace

import torch

from subtoken_train.cache.cache import PackedCache
from subtoken_train.cache.key_basis import KeyBasis
from subtoken_train.cache.packed_layer import PackedLayer
from subtoken_train.kernels.row_table import FusedState, RowTable, Workspace

LEAST = 64  # places of a room; others are twice as many, and so on


def shape_of(cache: PackedCache, room: int) -> Hashable:
    """Return what a step of a cache depends on, its tensors' contents left out; equal ones share their graph.

    What the fused kernels do not read is found by the host, so that such a cache is like no other.
    """
    cache.prepare()
    assert cache.next_position is not None
    layers = []
    for layer in cache.layers:
        basis = layer.basis and (type(layer.basis), *(tuple(each.shape) for each in _tensors(layer.basis)))
        found = layer.fused.table if all(block.pages is None for block in layer.blocks) else None
        table = weakref.ref(cache) if found is None else found.room
        states = tuple(layer.keys.shape[:2]), layer.keys.shape[3], layer.keys.dtype, layer.device
        layers.append((states, layer.tail_start_B is None, layer.reaches(room) and layer.window, basis, table))
    return room, tuple(cache.next_position.shape), tuple(layers)


def room_for(tokens: int) -> int:
    """Return the places of the least room that holds so many tokens."""
    return max(LEAST, 1 << (tokens - 1).bit_length())


class OneShape:
    """The tensors of a step of one shape, made for a cache that moves into them; at most one cache is there.

    Attributes:
        room: places of every tail, T.
        written: tokens of the tails, int64 [1].
        position: of the next token, as ``PackedCache.next_position``; steps count both up in place.
        first_B: positions of the tails' first places.
    """

    def __init__(self, cache: PackedCache, room: int) -> None:
        assert cache.next_position is not None
        self.room, self.position = room, cache.next_position.clone()
        self.first_B = self.position[..., 0].clone()
        self.written = torch.zeros(1, dtype=torch.long, device=cache.layers[0].device)
        workspace = Workspace()  # no other step's, which may outgrow it
        self.layers = [_LayerShape(layer, room, workspace) for layer in cache.layers]
        self.holds: weakref.ref[PackedCache] | None = None

    def take(self, cache: PackedCache) -> None:
        """Let a cache of this shape move in; one that is still here moves out."""
        before = None if self.holds is None else self.holds()
        if before is not None and before.shape is self:
            before.free_shape()
        assert cache.next_position is not None
        self.written.fill_(cache.layers[0].tail_length)
        cache.next_position = self.position.copy_(cache.next_position)
        self.first_B.copy_(self.position[..., 0] - cache.layers[0].tail_length)
        cache.shape, self.holds = self, weakref.ref(cache)
        for held, layer in zip(self.layers, cache.layers, strict=True):
            held.take(layer)
            layer.written = self.written

    def release(self, cache: PackedCache) -> None:
        """Let the cache move out, with what is its own; it is an ordinary cache again, whose tails grow."""
        cache.shape, cache.next_position = None, self.position.clone()
        for held, layer in zip(self.layers, cache.layers, strict=True):
            held.release(layer)


class _LayerShape:
    def __init__(self, layer: PackedLayer, room: int, workspace: Workspace) -> None:
        batch, heads, _, width = layer.keys.shape
        self.keys, self.values = (layer.keys.new_zeros(batch, heads, room, width) for _ in range(2))
        self.start_B = None if layer.tail_start_B is None else layer.tail_start_B.clone()
        self.basis = layer.basis and _cloned(layer.basis)
        table = layer.fused.table
        self.fused = FusedState(workspace, None if table is None else table.padded())
        self.own: tuple[KeyBasis | None, FusedState, RowTable | None] | None = None

    def take(self, layer: PackedLayer) -> None:
        length, table = layer.tail_length, layer.fused.table
        self.own = layer.basis, layer.fused, table
        for room, states in ((self.keys, layer.keys), (self.values, layer.values)):
            room[:, :, :length] = states[:, :, :length]
            room[:, :, length:] = 0  # of a cache before it
        if self.start_B is not None:
            self.start_B.copy_(layer.tail_start_B)
        if self.basis is not None:
            for held, own in zip(_tensors(self.basis), _tensors(layer.basis), strict=True):
                held.copy_(own)
        if table is not None:
            assert self.fused.table is not None
            self.fused.table.take(table)
        layer.keys, layer.values, layer.tail_start_B, layer.basis = self.keys, self.values, self.start_B, self.basis
        layer.fused = self.fused

    def release(self, layer: PackedLayer) -> None:
        assert self.own is not None
        layer.keys, layer.values = (room[:, :, : layer.tail_length].clone() for room in (self.keys, self.values))
        layer.tail_start_B = None if self.start_B is None else self.start_B.clone()
        (layer.basis, layer.fused, layer.fused.table), self.own, layer.written = self.own, None, None


def _tensors(basis: KeyBasis | None) -> list[torch.Tensor]:
    return [] if basis is None else [getattr(basis, each.name) for each in fields(basis)]


def _cloned(basis: KeyBasis) -> KeyBasis:
    return replace(basis, **{each.name: getattr(basis, each.name).clone() for each in fields(basis)})
