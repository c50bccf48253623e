"""Layers of a prompt's pass, from dense keys and values to packed ones.

Legend: B batch, M rows of a layer, h key-value heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor
from transformers import DynamicCache

from subtoken_train.cache.cache import PackedCache
from subtoken_train.cache.pack import Packing, pack_layer
from subtoken_train.cache.packed_layer import PackedLayer
from subtoken_train.cache.plan_marks import RowCounts, plan_marks, read_counts
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.functional.merging import merged
from subtoken_train.functional.moving import on_device
from subtoken_train.inference.compression import BITS, Compression
from subtoken_train.inference.key_cut import KeyCut
from subtoken_train.inference.rerotation import Rerotation
from subtoken_train.kernels.fill import Fill
from subtoken_train.kernels.storage import Block, RoutedValues
from subtoken_train.ledger.kv_budget import kept_channels
from subtoken_train.types import LayerPlan


@dataclass
class LayerPacker:
    """Packs a prompt's layers, in any order; each one's dense states are let go.

    Attributes:
        backbone: what ran.
        compression: precision, and whether keys are re-rotated.
        cache: is filled.
        prompt_length: tokens of the unreduced prompts, padding included.
        dense: the cache that the pass fills.
        packing: layout and precision.
        rerotation: closes up the keys; None: they keep their positions.
        key_cut: chooses key channels; observes the pass. None: all stay.
    """

    backbone: CompressedBackbone
    compression: Compression
    cache: PackedCache
    prompt_length: int
    dense: DynamicCache = field(init=False)
    packing: Packing = field(init=False)
    rerotation: Rerotation | None = field(init=False)
    key_cut: KeyCut | None = field(init=False)

    def __post_init__(self) -> None:
        family, routing, bits = self.backbone.family, self.backbone.active_routing, BITS[self.compression.kv_dtype]
        self.dense = family.dense_cache()
        self.packing = Packing(kv_bits=bits) if routing is None else Packing(routing.layout, bits)
        self.rerotation = Rerotation(family.rotation) if self.compression.rerotate else None
        width = family.shape.head_dim
        self.key_cut = KeyCut(self.compression) if kept_channels(width, self.compression.key_channels) < width else None

    def counts(self, layers: list[LayerPlan]) -> Sequence[RowCounts | None]:
        """What layers will store, read from the device at once; None where that hangs on their keys."""
        if self.key_cut is not None:
            return [None] * len(layers)
        shape = self.backbone.family.shape
        return read_counts(
            [plan_marks(kept, shape.num_kv_heads, shape.head_dim, self.packing.layout) for kept in layers]
        )

    def pack(
        self,
        layer: int,
        kept: LayerPlan,
        keep_BhM: Tensor,
        entries_BM: Tensor,
        position: Tensor,
        counts: RowCounts | None = None,
        fill_BV: Tensor | None = None,
    ) -> None:
        """Pack what a layer keeps.

        Args:
            layer: its number.
            kept: its plan; which keys are cut is written into it, and whether a fill was stored.
            keep_BhM: the rows that the plan keeps, bool; [B, 1, M] where heads share a set.
            entries_BM: its rows that are entries before any eviction, bool.
            position: position ids of its rows, [B, M] or [3, B, M].
            counts: of ``counts``; None: they are read now.
            fill_BV: what dropped groups read as, see ``RoutingState.fills``; None: zero.

        Raises:
            ValueError: keys that cannot be closed up, see ``Rerotation``.
        """
        states, packed = self.dense.layers[layer], self.cache.layers[layer]
        assert isinstance(packed, PackedLayer)
        keys, values = states.keys, states.values
        states.keys = states.values = None
        here = on_device(kept, keys.device)
        keep_BhM, entries_BM, position = (each.to(keys.device) for each in (keep_BhM, entries_BM, position))
        keys, values = merged(self.compression.merging, keys, values, keep_BhM, entries_BM)
        if self.key_cut is not None:
            self.key_cut.cut(layer, here, keys)
            kept.cut_keys = on_device(here.cut_keys, kept.entries_BN.device)
        if self.rerotation is not None:
            keys = self.rerotation.closed_up(keys, keep_BhM, position)
        window = self.backbone.family.window(layer, position)
        places = None if window is None else window.position_BN
        own_fill = None if fill_BV is None else fill_BV.to(values.device)
        rounded = None if own_fill is None else own_fill.to(values.dtype)
        blocks = pack_layer(keys, values, here, self.packing, places, counts, rounded)
        filler = None if own_fill is None else self._filler(blocks, own_fill, len(keys))
        kept.filled = filler is not None and filler.stored
        packed.fill(blocks, self.prompt_length, keys, filler)
        packed.window = None if window is None else window.size

    def _filler(self, blocks: list[Block], fill_BV: Tensor, batch: int) -> Fill | None:
        """What the layer reads for pieces that are not stored; None where all are."""
        if not any(isinstance(part.values, RoutedValues) for block in blocks for part in block.parts):
            return None
        assert self.backbone.bank is not None
        vectors = fill_BV.view(len(fill_BV), self.backbone.family.shape.num_kv_heads, -1)
        return Fill(vectors.expand(batch, -1, -1), self.backbone.bank.config.fill == "mean")

    def begin_tails(self, next_position: Tensor) -> None:
        """Say where the first token after the prompts stands, [B, 1] or [3, B, 1], once all layers are packed."""
        for layer in self.cache.layers:
            assert isinstance(layer, PackedLayer)
            if layer.window is not None:
                layer.begin_tail(next_position[:, 0])
