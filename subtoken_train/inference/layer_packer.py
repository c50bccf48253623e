"""Layers of a prompt's pass, from dense keys and values to packed ones: key channels are cut, keys re-rotated.

**Cut key channels** (ThinK): the queries of a prompt's last rows, with the keys that stay after an eviction, say which
channels of each key-value head matter. Along *principal axes* (RotateK) all keys of the layer, later ones too, then
stand in the basis of these axes.

**Re-rotation**: the kept keys of every head are turned to 0, 1, 2, ... in their order, and the next token follows, as
kvpress' ``KeyRerotationPress`` does. streaming-llm (Xiao et al., 2024) turns keys at every step, which is the same.

Legend: B batch, N entries of a plan, M rows of a layer, h key-value heads, d head width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import DynamicCache

from subtoken_train.cache.cache import PackedCache
from subtoken_train.cache.key_basis import BalancedBasis, KeyBasis, MirroredBasis
from subtoken_train.cache.pack import Packing, RowCounts, pack_layer, read_counts
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.engine.prompt_pass import Rows
from subtoken_train.functional.gather import last_marked, on_device, take_rows
from subtoken_train.functional.key_axes import BLOCK, key_energy, query_energy, query_lengths, turn_of
from subtoken_train.functional.masks import fixed_mask
from subtoken_train.functional.merging import merged
from subtoken_train.functional.rotary import Rotation
from subtoken_train.inference.compression import Compression
from subtoken_train.kernels.formats import FORMATS
from subtoken_train.kernels.storage import Fill, RoutedValues
from subtoken_train.ledger.kv_budget import kept_channels
from subtoken_train.types import CutKeys, LayerPlan, Region


class KeyCut:
    """The observer of one prompt pass that notes the last queries of layers, then says what stays of the keys."""

    def __init__(self, compression: Compression) -> None:
        self.compression = compression
        self.asked: dict[int, Tensor] = {}
        self.regions: dict[int, Tensor] = {}
        self.cuts: bool | None = None

    def observe(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, rows: Rows) -> None:
        """Note a layer's last queries."""
        self.regions[layer] = rows.regions_BM
        asks_BM = last_marked(rows.regions_BM != Region.PADDING, self.compression.key_window)
        asked = query_energy if self.compression.key_axes == "own" else query_lengths
        self.asked[layer] = asked(query, asks_BM, key.shape[1])

    def cut(self, layer: int, plan: LayerPlan, key_BhMd: Tensor) -> None:
        """Write into a plan which keys are cut, and to which channels; nothing if the prompts have none to cut."""
        may_BM = self.compression.cuts_keys(self.regions[layer])
        if self.cuts is None:  # read once: rows that leave on the way add none
            self.cuts = bool(may_BM.any())
        if not self.cuts:
            return
        rows_BN, valid_BN = plan.rows_BN, plan.entries_BN >= 0
        assert rows_BN is not None
        heads_BhN = valid_BN[:, None] if plan.heads_BNh is None else (plan.heads_BNh & valid_BN[..., None]).mT
        count = kept_channels(key_BhMd.shape[-1], self.compression.key_channels)
        cut_BN = take_rows(may_BM, rows_BN) & valid_BN
        if self.compression.key_axes == "own":
            scores = self.asked[layer] * key_energy(key_BhMd, rows_BN, heads_BhN)
            plan.cut_keys = CutKeys(cut_BN, fixed_mask(scores, count))
            return
        turn, channels = turn_of(key_BhMd, rows_BN, heads_BhN & cut_BN[:, None], self.asked[layer], count)
        plan.cut_keys = CutKeys(cut_BN, channels, turn)


class QueryMoments:
    """The observer of one prompt pass: notes every layer's mean of q q^T, by which keys of a basis are rounded."""

    def __init__(self) -> None:
        self.of: dict[int, Tensor] = {}

    def observe(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, rows: Rows) -> None:
        """Note the queries of a layer's rows."""
        visible_BN = (rows.regions_BM != Region.PADDING).to(query.device)
        total = query.new_zeros(*key.shape[:2], *2 * key.shape[-1:], dtype=torch.float32)
        for some, marks_Bn in zip(torch.split(query, BLOCK, 2), torch.split(visible_BN, BLOCK, 1), strict=True):
            own_Bhnd = (some * marks_Bn[:, None, :, None]).float().reshape(*key.shape[:2], -1, key.shape[-1])
            total += own_Bhnd.mT @ own_Bhnd
        count_B = visible_BN.sum(-1).clamp(min=1) * (query.shape[1] // key.shape[1])
        self.of[layer] = total / count_B[:, None, None, None]


@dataclass
class Rerotation:
    """Closes up the keys of one layer after another.

    ``rotate`` gives a layer's rotation at position ids [B, N]; ``count_B`` are the entries that every head keeps,
    int64.
    """

    rotate: Callable[[int, Tensor], Rotation]
    count_B: Tensor | None = None

    def closed_up(self, layer: int, key_BhNd: Tensor, keep_BhN: Tensor, position_BN: Tensor) -> Tensor:
        """Turn a layer's kept keys to positions 0, 1, 2, ... in their order, per head; the others are void.

        ``key_BhNd`` is rotated by ``position_BN``; ``keep_BhN`` is [B, 1, N] where heads share a set.
        """
        count_Bh = keep_BhN.sum(-1)
        before_B = count_Bh[:, 0] if self.count_B is None else self.count_B.to(count_Bh.device)
        unlike_B = (count_Bh != before_B[:, None]).any(-1)
        if bool(unlike_B.any()):
            first = int(unlike_B.int().argmax())
            fewest, most = (int(each) for each in torch.cat([count_Bh[first], before_B[first, None]]).aminmax())
            words = f"rerotate: heads or layers keep between {fewest} and {most} entries of a prompt, but what follows"
            raise ValueError(f"{words} needs one position; use methods that keep as many in each, or no rerotate")
        self.count_B = before_B
        unrotated = self.rotate(layer, position_BN).turn_back(key_BhNd)
        place_BhN = (keep_BhN.cumsum(-1) - 1).clamp(min=0)
        if keep_BhN.shape[1] == 1:
            return self.rotate(layer, place_BhN[:, 0]).turn(unrotated).to(key_BhNd)
        heads = zip(place_BhN.unbind(1), unrotated.chunk(unrotated.shape[1], 1), strict=True)
        return torch.cat([self.rotate(layer, place_BN).turn(head) for place_BN, head in heads], 1).to(key_BhNd)

    @property
    def next_position(self) -> Tensor:
        """Position id of the next token, [B, 1]."""
        assert self.count_B is not None
        return self.count_B[:, None]


@dataclass
class LayerPacker:
    """Packs a prompt's layers, in any order; each one's dense states are let go.

    ``prompt_length`` counts tokens of the unreduced prompts, padding included; the pass fills ``dense`` and is observed
    by ``key_cut`` (None: all channels stay) and by ``moments`` of queries, where keys are stored in a basis.
    """

    backbone: CompressedBackbone
    compression: Compression
    cache: PackedCache
    prompt_length: int
    dense: DynamicCache = field(init=False)
    packing: Packing = field(init=False)
    rerotation: Rerotation | None = field(init=False)
    key_cut: KeyCut | None = field(init=False)
    moments: QueryMoments | None = field(init=False)

    def __post_init__(self) -> None:
        family, routing, form = self.backbone.family, self.backbone.active_routing, FORMATS[self.compression.kv_dtype]
        self.dense = family.dense_cache()
        self.packing = Packing(form=form) if routing is None else Packing(routing.layout, form)
        self.rerotation = Rerotation(family.rotation) if self.compression.rerotate else None
        self.moments = QueryMoments() if form.rotates else None
        width = family.shape.head_dim
        self.key_cut = KeyCut(self.compression) if kept_channels(width, self.compression.key_channels) < width else None

    def counts(self, layers: list[LayerPlan]) -> Sequence[RowCounts | None]:
        """Count what layers will store, read from the device at once; None where it depends on their keys."""
        if self.key_cut is not None:
            return [None] * len(layers)
        shape, packing = self.backbone.family.shape, self.packing
        return read_counts(layers, shape.num_kv_heads, shape.head_dim, packing.layout, packing.form)

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

        ``keep_BhM`` are rows that the plan keeps, [B, 1, M] where heads share a set; ``entries_BM`` its entries before
        any eviction; ``position`` ids are [B, M] or [3, B, M].
        """
        states, packed = self.dense.layers[layer], self.cache.layers[layer]
        keys, values = states.keys, states.values
        states.keys = states.values = None
        here = kept if kept.entries_BN.device == keys.device else on_device(kept, keys.device)
        keep_BhM, entries_BM, position = (each.to(keys.device) for each in (keep_BhM, entries_BM, position))
        keys, values = merged(self.compression.merging, keys, values, keep_BhM, entries_BM)
        if self.key_cut is not None:
            self.key_cut.cut(layer, here, keys)
            kept.cut_keys = on_device(here.cut_keys, kept.entries_BN.device)
        measured_BhM = entries_BM[:, None]
        if self.rerotation is not None:  # what does not stay has no place any more
            keys, measured_BhM = self.rerotation.closed_up(layer, keys, keep_BhM, position), keep_BhM
        packing = replace(self.packing, form=self.packing.form.in_layer(layer, len(self.cache.layers)))
        basis: KeyBasis | None = None if self.moments is None else BalancedBasis.of(keys, measured_BhM)
        if here.cut_keys is not None and here.cut_keys.turn is not None:
            basis = MirroredBasis(**vars(here.cut_keys.turn))
        keys = keys if basis is None else basis.keys(keys)
        if isinstance(basis, BalancedBasis):
            assert self.moments is not None
            packing = replace(packing, feedback_Bhdd=basis.feedback(self.moments.of[layer].to(keys.device)))
        window = self.backbone.family.window(layer, position)
        places = None if window is None else window.position_BN
        own_fill = None if fill_BV is None else fill_BV.to(values.device)
        rounded = None if own_fill is None else own_fill.to(values.dtype)
        blocks = pack_layer(keys, values, here, packing, places, counts, rounded)
        fill: Fill | None = None
        routed = (part.values for block in blocks for part in block.parts)
        if own_fill is not None and any(isinstance(values, RoutedValues) for values in routed):
            assert self.backbone.bank is not None
            vectors = own_fill.view(len(own_fill), self.backbone.family.shape.num_kv_heads, -1)
            fill = Fill(vectors.expand(len(keys), -1, -1), self.backbone.bank.config.fill == "mean")
        kept.filled = fill is not None and fill.stored
        packed.store_prompt(blocks, self.prompt_length, keys, fill, basis)
        packed.window = None if window is None else window.size

    def make_ready(self, next_position: Tensor) -> None:
        """Make the cache ready to decode once all layers are packed; ``next_position`` is [B, 1] or [3, B, 1]."""
        cache, turned = self.cache, self.rerotation
        place = next_position if turned is None else turned.next_position.to(next_position.device)
        cache.next_position = place
        for layer in cache.layers:
            if layer.window is not None:
                layer.begin_tail(place[:, 0])
        cache.prepare()
        cache.origin_B = torch.arange(place.shape[-2], device=place.device)
