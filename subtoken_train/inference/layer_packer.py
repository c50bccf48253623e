"""Layers of a prompt's pass, from dense keys and values to packed ones: key channels are cut, keys re-rotated.

**Cut key channels** (ThinK): the queries of a prompt's last rows, with the keys that stay after an eviction, say which
channels of each key-value head matter. Along *principal axes* (RotateK) all keys of the layer, later ones too, then
stand in the basis of these axes.

**Re-rotation**: the kept keys of every head are turned to 0, 1, 2, ... in their order, and the next token follows, as
kvpress' ``KeyRerotationPress`` does. streaming-llm (Xiao et al., 2024) turns keys at every step, which is the same.

Legend: B batch, N entries of a plan, M rows of a layer, h key-value heads, d head width.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import DynamicCache

from subtoken_train.cache.cache import PackedCache
from subtoken_train.cache.key_basis import BalancedBasis, KeyBasis, MirroredBasis
from subtoken_train.cache.pack import Packing, RowCounts, pack_layer, read_counts
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.engine.prompt_pass import Rows
from subtoken_train.errors import refuse
from subtoken_train.functional.gather import last_marked, on_device, take_rows
from subtoken_train.functional.key_axes import BLOCK, key_energy, query_energy, query_lengths, turn_of
from subtoken_train.functional.masks import fixed_mask
from subtoken_train.functional.merging import merged
from subtoken_train.functional.rotary import Rotation
from subtoken_train.inference.compression import Compression
from subtoken_train.kernels.formats import FORMATS, Format
from subtoken_train.kernels.native import keep_freed_memory
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
        self.regions[layer], window = rows.regions_BM, self.compression.key_window
        asks_BM = last_marked(rows.regions_BM != Region.PADDING, window)
        asked = query_energy if self.compression.key_axes == "own" else query_lengths
        # prompts with fewer rows than the window have none to cut
        self.asked[layer] = asked(query, asks_BM, key.shape[1], min(window, asks_BM.shape[1]))

    def mark(self, layer: int, plan: LayerPlan, kept: int) -> None:
        """Write into a plan which keys are cut to ``kept`` channels; nothing if the prompts have none to cut."""
        may_BM = self.compression.cuts_keys(self.regions[layer])
        if self.cuts is None:  # read once: rows that leave on the way add none
            self.cuts = bool(may_BM.any())
        if self.cuts:
            assert plan.rows_BN is not None
            cut_BN = take_rows(may_BM.to(plan.rows_BN.device), plan.rows_BN) & (plan.entries_BN >= 0)
            plan.cut_keys = CutKeys(cut_BN, kept)

    def cut(self, layer: int, plan: LayerPlan, key_BhMd: Tensor) -> CutKeys | None:
        """Return a plan's cut keys with the channels that stay of them."""
        rows_BN, valid_BN, cut = plan.rows_BN, plan.entries_BN >= 0, plan.cut_keys
        if cut is None:
            return None
        assert rows_BN is not None
        heads_BhN = valid_BN[:, None] if plan.heads_BNh is None else (plan.heads_BNh & valid_BN[..., None]).mT
        if self.compression.key_axes == "own":
            scores = self.asked[layer] * key_energy(key_BhMd, rows_BN, heads_BhN)
            return replace(cut, channels_Bhd=fixed_mask(scores, cut.kept))
        turn, channels = turn_of(key_BhMd, rows_BN, heads_BhN & cut.entries_BN[:, None], self.asked[layer], cut.kept)
        return replace(cut, channels_Bhd=channels, turn=turn)


class QueryMoments:
    """The observer of one prompt pass: notes every layer's sum of q q^T, by which keys of a basis are rounded."""

    def __init__(self) -> None:
        self.of: dict[int, Tensor] = {}

    def observe(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, rows: Rows) -> None:
        """Add the queries of a layer's rows."""
        visible_BN = (rows.regions_BM != Region.PADDING).to(query.device)
        total = query.new_zeros(*query.shape[:2], *2 * key.shape[-1:], dtype=torch.float32)
        for some, marks_Bn in zip(torch.split(query, BLOCK, 2), torch.split(visible_BN, BLOCK, 1), strict=True):
            own_BHnd = (some * marks_Bn[:, None, :, None]).float()
            total += own_BHnd.mT @ own_BHnd
        total = torch.unflatten(total, 1, (key.shape[1], -1)).sum(2)
        self.of[layer] = total + self.of.get(layer, 0)


@dataclass
class Rerotation:
    """Closes up the keys of one layer after another.

    ``rotate`` gives a layer's rotation at position ids [B, N]; ``counts`` are, by layer, the entries that heads keep,
    int64 [B, h or 1].
    """

    rotate: Callable[[int, Tensor], Rotation]
    counts: list[Tensor] = field(default_factory=list)

    def closed_up(self, layer: int, key_BhNd: Tensor, keep_BhN: Tensor, position_BN: Tensor) -> Tensor:
        """Turn a layer's kept keys to positions 0, 1, 2, ... in their order, per head; the others are void.

        ``key_BhNd`` is rotated by ``position_BN``; ``keep_BhN`` is [B, 1, N] where heads share a set.
        """
        self.counts.append(keep_BhN.sum(-1))
        unrotated = self.rotate(layer, position_BN).turn_back(key_BhNd)
        place_BhN = (keep_BhN.cumsum(-1) - 1).clamp(min=0)
        if keep_BhN.shape[1] == 1:
            return self.rotate(layer, place_BhN[:, 0]).turn(unrotated).to(key_BhNd)
        heads = zip(place_BhN.unbind(1), unrotated.chunk(unrotated.shape[1], 1), strict=True)
        return torch.cat([self.rotate(layer, place_BN).turn(head) for place_BN, head in heads], 1).to(key_BhNd)

    def next_position(self, device: torch.device) -> Tensor:
        """Return the next token's position id, [B, 1]; ``ValueError`` where heads or layers ask for unlike ones."""
        fewest_B, most_B = torch.cat([count_Bh.to(device) for count_Bh in self.counts], 1).aminmax(dim=-1)
        for fewest, most in torch.stack([fewest_B, most_B], 1).tolist():
            words = f"rerotate: heads or layers keep between {fewest} and {most} entries of a prompt, but what follows"
            instead = "use methods that keep as many in each, or no rerotate"
            refuse((fewest != most, f"{words} needs one position; {instead}"))
        return fewest_B[:, None]


class LayerPacker:
    """Packs a prompt's layers, in any order; each one's dense states are let go.

    ``prompt_length`` counts tokens of the unreduced prompts, padding included; the pass fills ``dense`` and is observed
    by ``key_cut`` (None: all channels stay) and by ``moments`` of queries, where keys are stored in a basis.
    """

    def __init__(
        self, backbone: CompressedBackbone, compression: Compression, cache: PackedCache, prompt_length: int
    ) -> None:
        keep_freed_memory()
        family, routing, form = backbone.family, backbone.active_routing, FORMATS[compression.kv_dtype]
        self.backbone, self.compression, self.cache, self.prompt_length = backbone, compression, cache, prompt_length
        self.dense: DynamicCache = family.dense_cache()
        self.packing = Packing(form=form) if routing is None else Packing(routing.layout, form)
        self.rerotation = Rerotation(family.rotation) if compression.rerotate else None
        self.moments = QueryMoments() if form.rotates else None
        width = family.shape.head_dim
        self.channels = kept_channels(width, compression.key_channels)
        self.key_cut = KeyCut(compression) if self.channels < width else None

    def counts(self, layers: list[LayerPlan], first: int = 0) -> list[RowCounts]:
        """Count what layers from ``first`` on will store, once their cut keys are marked; the device is read once."""
        for layer, plan in enumerate(layers, first):
            if self.key_cut is not None:
                self.key_cut.mark(layer, plan, self.channels)
        shape, forms = self.backbone.family.shape, [self.form(layer) for layer in range(first, first + len(layers))]
        return read_counts(layers, shape.num_kv_heads, shape.head_dim, self.packing.layout, forms)

    def form(self, layer: int) -> Format:
        """Return the format of a layer."""
        return self.packing.form.in_layer(layer, len(self.cache.layers))

    def pack(
        self,
        layer: int,
        kept: LayerPlan,
        keep_BhM: Tensor,
        entries_BM: Tensor,
        position: Tensor,
        counts: RowCounts,
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
        keys, values = merged(self.compression.merging, keys, values, keep_BhM, entries_BM, counts.longest)
        if self.key_cut is not None:
            here = replace(here, cut_keys=self.key_cut.cut(layer, here, keys))
            kept.cut_keys = on_device(here.cut_keys, kept.entries_BN.device)
        measured_BhM = entries_BM[:, None]
        if self.rerotation is not None:  # what does not stay has no place any more
            keys, measured_BhM = self.rerotation.closed_up(layer, keys, keep_BhM, position), keep_BhM
        packing = replace(self.packing, form=self.form(layer))
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
        place = next_position if turned is None else turned.next_position(next_position.device)
        cache.next_position = place
        for layer in cache.layers:
            if layer.window is not None:
                layer.begin_tail(place[:, 0])
        cache.prepare()
        cache.origin_B = torch.arange(place.shape[-2], device=place.device)
