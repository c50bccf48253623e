"""Eviction while tokens are decoded: memory stays bounded, however long an answer grows.

Whenever ``every`` tokens came since the last time, and more follow, the method scores each layer's cache, the entries
of the prompt that competed and what was appended since, by the queries of the last rows, and keeps as many per head as
the prompt's budget allows (under a threshold, what scores no less). The tail is packed when something is evicted; kept
entries of the prompt lie as they were stored. ``merge`` acts on the prompt alone. Idea: kvpress's ``DecodingPress``.

Legend: B batch, L layers, h key-value heads, H query heads, R rows (B, or B * h where heads hold entries of their own),
c key heads of a row, M stored entries, T tail tokens, N = M + T, k statistics of a head, n query rows, d head width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Self

import torch
from torch import Tensor

from subtoken_train.cache.cache import PackedCache
from subtoken_train.cache.entries import STAYS, EvictionState, read_keys, read_values
from subtoken_train.cache.packed_layer import PackedLayer
from subtoken_train.errors import refuse
from subtoken_train.evictions.base import Eviction
from subtoken_train.evictions.thresholds import Threshold
from subtoken_train.functional.gather import on_device
from subtoken_train.functional.rotary import Rotation
from subtoken_train.inference.eviction_pass import EvictionPass
from subtoken_train.kernels.formats import FORMATS, Format
from subtoken_train.kernels.storage import dense_values
from subtoken_train.types import Plan, Region
from subtoken_train.view.scores import Candidates, Scores
from subtoken_train.view.view import ABSENT, View, reads_values

Rotate = Callable[[int, Tensor], Rotation]
"""Rotation of a layer at position ids."""


@dataclass
class HeldLayer:
    """A layer's entries by row, oldest first, then its tail; ``order_RM``: their places in the order of storage."""

    layer: PackedLayer
    state: EvictionState
    order_RM: Tensor
    place_RN: Tensor
    regions_RN: Tensor
    competes_RN: Tensor

    @classmethod
    def of(cls, layer: PackedLayer) -> Self:
        """Lay out the entries of a layer that has a state."""
        state = layer.eviction_state
        assert state is not None
        place_RN, code_RN = state.with_tail(layer.tail_length, layer.tail_start_B)
        stored_RM = place_RN[:, : state.place_RM.shape[1]]
        order_RM = stored_RM.masked_fill(stored_RM < 0, torch.iinfo(torch.int64).max).sort(dim=-1, stable=True).indices
        place_RN, code_RN = _arranged(place_RN, order_RM), _arranged(code_RN, order_RM)
        regions_RN = code_RN % STAYS
        return cls(layer, state, order_RM, place_RN, regions_RN, (regions_RN != Region.PADDING) & (code_RN < STAYS))

    @property
    def heads(self) -> int:
        """Rows of a sample."""
        return len(self.place_RN) // len(self.state.seen_B)

    def budget(self) -> Tensor:
        """Return how many competing entries of each row may stay, int64 [R]."""
        return self.state.budget_B.repeat_interleave(self.heads)

    def needs(self) -> Tensor:
        """Mark the samples with more competing entries than may stay, bool [B]."""
        return (self.competes_RN.sum(-1) > self.budget()).view(-1, self.heads).any(-1)

    def recent(self, window: int) -> Tensor:
        """Mark the entries at the last ``window`` places of each row, bool [R, N]."""
        seen_R1 = self.place_RN.amax(-1, keepdim=True) + 1
        return (self.regions_RN != Region.PADDING) & (self.place_RN >= seen_R1 - window)

    def view(self, number: int, scale: float, method: Eviction, rotate: Rotate, next_position: Tensor) -> View:
        """Return the layer as its method sees it, its keys and values read back from storage."""
        state, tail, rows, values = self.state, self.layer.tail_rows(), len(self.place_RN), ABSENT
        keys = self.layer.own_keys(self._dense(read_keys(self.layer.blocks, rows), tail.keys.read()))
        if reads_values(method.needs):
            values = self._dense(read_values(self.layer.blocks, rows, self.layer.fill), dense_values(tail))
        query, carried = ABSENT, state.carried(tail.entries)
        if state.queries:
            query_BHnd = torch.cat(list(state.queries), 2)
            query_BHnd = query_BHnd if state.observed is None else query_BHnd[:, :, -state.observed :]
            query = query_BHnd.reshape(rows, -1, *query_BHnd.shape[2:])
        states = number, query, keys, values, self.regions_RN, scale, method.needs, self.competes_RN
        return View(
            *states,
            carried=None if carried is None else _arranged(carried, self.order_RM),
            budget=self.budget,
            input_BND=torch.cat(state.inputs, 1) if state.inputs else ABSENT,
            place_BN=self.place_RN,
            seen_B=self.place_RN.amax(-1) + 1,
            rotate=partial(rotate, number),
            next_position=next_position.to(self.place_RN.device).repeat_interleave(self.heads, -2),
            heads=self.heads,
        )

    def _dense(self, stored_RcMd: Tensor, tail_RcTd: Tensor) -> Tensor:
        index = self.order_RM[:, None, :, None].expand(-1, stored_RcMd.shape[1], -1, stored_RcMd.shape[-1])
        return torch.cat([stored_RcMd.gather(2, index), tail_RcTd.to(stored_RcMd.dtype)], 2)

    def carry(self, carried_RkN: Tensor | None) -> None:
        """Note what the method said of the entries of its view."""
        self.state.carry(None if carried_RkN is None else _arranged(carried_RkN, self.order_RM.argsort(-1)))

    def keep(self, keep_RN: Tensor, settles_B: Tensor, form: Format) -> None:
        """Keep the marked entries of the view."""
        self.layer.keep(_arranged(keep_RN, self.order_RM.argsort(-1)), settles_B, form)


def _arranged(of_entries: Tensor, order_RM: Tensor) -> Tensor:
    """Return values of entries, [R, N] or [R, k, N], with the first M in another order."""
    stored = order_RM.shape[1]
    order = order_RM if of_entries.dim() == 2 else order_RM[:, None].expand(-1, of_entries.shape[1], -1)
    return torch.cat([of_entries[..., :stored].gather(-1, order), of_entries[..., stored:]], -1)


def evict_while_decoding(cache: PackedCache, eviction: EvictionPass, plan: Plan, names: Sequence[str]) -> None:
    """Let a cache that was just filled evict while tokens are decoded."""
    compression, method = eviction.compression, eviction.method
    assert compression.every is not None
    assert method.online is not None
    layers = [eviction.lasting[number] for number in range(len(cache.layers))]
    least_B = torch.stack([own.budget_B for own in layers]).amin(0).tolist()
    every, bounded = compression.every, compression.unit != "tokens" and compression.threshold is None
    for name, least in zip(names, least_B, strict=True):
        words = f"is more than the budget of {name!r}, whose prompt keeps {least} entries per layer"
        instead = f"use eviction_keep {2 * every} tokens, or a smaller eviction_every"
        refuse((bounded and least < every, f"eviction_every={every} {words}; {instead}"))
    for layer, lasting, planned in zip(cache.layers, layers, plan.layers, strict=True):
        own, kept = on_device(lasting, layer.device), on_device(planned, layer.device)
        states = kept, own.regions_BM, own.competes_BM, own.budget_B, method.online.rows, own.carried
        layer.eviction_state = EvictionState.of_prompt(*states, "inputs" in method.needs)
    scales, form = [own.scale for own in layers], FORMATS[compression.kv_dtype]
    cache.evictor = OnlineEviction(method, every, scales, form, eviction.family.rotation, compression.threshold)


@dataclass
class OnlineEviction:
    """Evicts from its cache at ``due`` generated tokens in the tail, by a ``threshold`` or the prompt's budgets."""

    method: Eviction
    every: int
    scales: list[float]
    form: Format
    rotate: Rotate
    threshold: Threshold | None = None
    due: int = field(init=False)
    evictions: int = 0

    def __post_init__(self) -> None:
        self.due = self.every

    def before_append(self, cache: PackedCache) -> None:
        """Evict if it is time; tokens of the prompt that were appended after its context are not counted."""
        first = cache.layers[0]
        assert first.eviction_state is not None
        if (generated := first.tail_length - first.eviction_state.given) < self.due:
            return
        layers = [HeldLayer.of(layer) for layer in cache.layers]
        home, following = layers[0].place_RN.device, cache.next_position
        assert following is not None
        needs_B = torch.stack([layer.needs().to(home) for layer in layers]).any(0)
        evicts = self.threshold is not None or bool(needs_B.any())
        scores: list[Scores] = []
        for number, layer in enumerate(layers):
            carried = None
            if evicts or layer.state.carried_RkN is not None:
                found = self.method.score(layer.view(number, self.scales[number], self.method, self.rotate, following))
                scores.append(on_device(found, home))
                carried = found.carried
            layer.carry(carried)
        self.due = generated + self.every
        if evicts:
            self._keep(layers, scores, needs_B)

    def _keep(self, layers: list[HeldLayer], scores: list[Scores], needs_B: Tensor) -> None:
        home = needs_B.device
        regions, competes = [x.regions_RN.to(home) for x in layers], [x.competes_RN.to(home) for x in layers]
        budget_LR = torch.stack([layer.budget().to(home) for layer in layers])
        candidates = Candidates(regions, competes, budget_LR, heads=layers[0].heads)
        if self.threshold is None:
            kept = self.method.keep(scores, candidates)
        else:
            recent = [layer.recent(self.threshold.window).to(home) for layer in layers]
            kept = self.threshold.keep(self.method, scores, candidates, recent)
            gone_LR = torch.stack([(own & ~keep[:, 0]).any(-1) for own, keep in zip(competes, kept, strict=True)])
            needs_B = gone_LR.any(0).view(-1, layers[0].heads).any(-1)
            if not bool(needs_B.any()):
                return
        for number, (layer, keep_R1N) in enumerate(zip(layers, kept, strict=True)):
            here = layer.place_RN.device
            layer.keep(keep_R1N[:, 0].to(here), needs_B.to(here), self.form.in_layer(number, len(layers)))
        self.due = self.every
        self.evictions += 1
