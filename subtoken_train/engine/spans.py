"""Run a stretch of decoder layers on a batch's rows: all rows at once, or a chunk of rows at a time.

In chunks, all rows of a prompt run through a layer before the next layer begins: exact, without a mask of all rows and
without wide intermediates of all. What is wide exists for a chunk alone (MLP, attention masks), and of keys and values
those of one layer, once ``finished`` takes them from the cache. What a layer decides from all of its rows (value
groups, a context reducer's pages) is decided before they run, from projections of the whole layer's input; the value
projection runs twice then, under a context reducer queries and keys as well.

Legend: B batch, N or M rows, D model width, S value groups, H query heads, h key-value heads, d head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from subtoken_train.engine.attention import ContextSplit, Observer, runs_sdpa
from subtoken_train.engine.prompt_pass import Rows
from subtoken_train.families.family import Family
from subtoken_train.functional.causal_attention import Seen
from subtoken_train.functional.moving import on_device
from subtoken_train.routing.state import RoutingState
from subtoken_train.types import Batch

LayerFinished = Callable[[int, Rows, Tensor | None, Tensor | None], None]
"""Called with (layer, rows, kept groups [B, N, S], what dropped ones read as) once a layer's dense keys and values are
in the cache; its rows' region is PADDING where they are no entry. May take them out of it."""


@dataclass(frozen=True)
class Chunks:
    """How a pass runs its layers.

    Attributes:
        size: rows at a time.
        finished: takes every layer.
    """

    size: int
    finished: LayerFinished


class QueryNotes:
    """An observer that notes the queries of a layer's chunks, and the factor of its scores."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []
        self.scale = 0.0

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
        """See ``Observer``."""
        self.parts.append(query)
        self.scale = scale

    def taken(self) -> Tensor:
        """All of them, [B, H, n, d]; they are let go."""
        query_BHnd = torch.cat(self.parts, 2)
        self.parts.clear()
        return query_BHnd


@torch.no_grad()
def run_chunks(
    family: Family,
    cache: Cache,
    layer: int,
    hidden_BND: Tensor,
    seen_BN: Tensor,
    position: Tensor,
    size: int,
    observer: Observer | None = None,
    split: ContextSplit | None = None,
    state: RoutingState | None = None,
    deep_nBND: Tensor | None = None,
    earlier_BM: Tensor | None = None,
    unpadded: bool = False,
) -> Tensor:
    """One layer's output for rows that stand after what its cache holds, [B, n, D].

    Args:
        family: in evaluation mode, with ``use_packed_attention``.
        cache: grows by the rows.
        layer: its number.
        hidden_BND: the rows, n of them.
        seen_BN: what may be seen, bool: of the cache's rows first, then of these.
        position: of the n rows, [B, n] or [3, B, n].
        size: rows at a time.
        observer: sees every chunk: its queries, all keys and values so far.
        split: as ``split_attention`` takes it; decided ahead.
        state: of the routers; routed ahead.
        deep_nBND: what the first layers add to their outputs, of the n rows.
        earlier_BM: positions of the cache's rows, in a layer with a window; None: it holds none yet.
        unpadded: whether all of ``seen_BN`` is known to be seen; then no mask is made where none is needed.
    """
    block, config = family.decoder.layers[layer], family.decoder.config
    before = seen_BN.shape[1] - hidden_BND.shape[1]
    out_BND = torch.empty_like(hidden_BND)
    options: dict[str, Any] = {"observer": observer}
    options |= {} if split is None else {"context_split": split}
    window = None
    if family.windows[layer] is not None:
        window = family.window(layer, position if earlier_BM is None else torch.cat([earlier_BM, position], 1))
    all_seen = Seen(None if unpadded else seen_BN, window)
    for start in range(0, hidden_BND.shape[1], size):
        part = slice(start, min(start + size, hidden_BND.shape[1]))
        if state is not None:
            state.part = part.start, part.stop
        rows, places = hidden_BND[:, part], position[..., part]
        deep = None if deep_nBND is None else deep_nBND[:, :, part]
        if runs_sdpa(config):
            options["seen"] = all_seen.until(before + part.stop)
            out_BND[:, part] = family.through([block], rows, None, places, cache, deep, **options)
        else:
            out_BND[:, part] = family.run_layers(
                rows, seen_BN[:, : before + part.stop], places, cache, layer, layer + 1, deep, **options
            )
    return out_BND


@torch.no_grad()
def look_ahead(
    family: Family,
    layer: int,
    hidden_BND: Tensor,
    position: Tensor,
    split: ContextSplit | None,
    state: RoutingState | None,
) -> None:
    """Decide what a layer decides from all of its rows: ``state.ahead`` and ``split.ahead`` have it then."""
    if split is None and state is None:
        return
    block = family.decoder.layers[layer]
    attention, normed_BND = block.self_attn, block.input_layernorm(hidden_BND)
    value_BND = attention.v_proj(normed_BND)  # whose hook routes, or defers

    def heads(projected_BND: Tensor) -> Tensor:
        return projected_BND.reshape(*projected_BND.shape[:2], -1, attention.head_dim).transpose(1, 2)

    if state is not None:
        state.ahead[layer] = value_BND
    if split is not None:
        query_BHNd = key_BhNd = heads(value_BND)  # of no account where nothing chooses
        if split.reducer is not None:
            query_BHNd, key_BhNd = family.query_heads(layer, normed_BND), family.key_heads(layer, normed_BND)
            angles = family.angles(normed_BND, position)
            query_BHNd, key_BhNd = family.rotate(query_BHNd, key_BhNd, angles)
        here = split.on(value_BND.device)
        split.ahead[layer] = here.decide(layer, query_BHNd, key_BhNd, heads(value_BND), attention.scaling)


PromptObserver = Callable[[int, Tensor, Tensor, Tensor, float, Rows], None]
"""Called with (layer, query, key, value, scale, rows) after each layer's attention, see ``Observer``.

``rows`` are the layer's, on its device, their region PADDING where a row is no entry of its cache.
"""


@dataclass(frozen=True)
class PassCall:
    """What one call of ``CompressedBackbone.run`` was given."""

    batch: Batch
    cache: Cache | None
    pad_left: bool
    observer: PromptObserver | None
    chunks: Chunks | None = None


def run_span(
    family: Family,
    call: PassCall,
    hidden_BMD: Tensor,
    rows: Rows,
    start: int,
    stop: int,
    split: ContextSplit | None = None,
    state: RoutingState | None = None,
) -> Tensor:
    """Layers ``start`` to ``stop`` on ``rows``, seen by the call's observer, [B, M, D].

    Args:
        family: the backbone.
        call: what runs.
        hidden_BMD: the rows.
        rows: where they stand.
        start: first layer.
        stop: one past the last.
        split: as ``split_attention`` takes it.
        state: of routers that act; a run in chunks needs it.
    """
    watch = call.observer

    def entries(layer: int) -> Rows:
        if split is None:
            return rows.in_window(family.windows[layer])
        seen_BM = split.seen[layer].to(rows.regions_BM.device)
        seen = replace(rows, regions_BM=rows.regions_BM.masked_fill(~seen_BM, 0))
        return seen.in_window(family.windows[layer])

    if call.chunks is not None:
        return _in_chunks(family, call, call.chunks, hidden_BMD, rows, range(start, stop), split, state, entries)
    options: dict[str, Any] = {} if split is None else {"context_split": split}
    if watch is not None:

        def observe(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
            value = value if split is None else split.routed.get(layer, value)
            watch(layer, query, key, value, scale, on_device(entries(layer), query.device))

        options["observer"] = observe
    deep = rows.deep_nBMD
    return family.run_layers(hidden_BMD, rows.visible_BM, rows.position, call.cache, start, stop, deep, **options)


def _in_chunks(
    family: Family,
    call: PassCall,
    chunks: Chunks,
    hidden_BMD: Tensor,
    rows: Rows,
    layers: range,
    split: ContextSplit | None,
    state: RoutingState | None,
    entries: Callable[[int], Rows],
) -> Tensor:
    assert call.cache is not None
    for layer in layers:
        look_ahead(family, layer, hidden_BMD, rows.position, split, state)
        notes = None if call.observer is None else QueryNotes()
        hidden_BMD = run_chunks(
            family,
            call.cache,
            layer,
            hidden_BMD,
            rows.visible_BM,
            rows.position,
            chunks.size,
            notes,
            split,
            state,
            rows.deep_nBMD,
            unpadded=rows.unpadded,
        )
        states, groups_BMS, fill = call.cache.layers[layer], None, None
        if split is not None:
            del split.ahead[layer]
            states.values = split.routed.pop(layer, states.values)
        if state is not None:
            del state.ahead[layer]
            state.choices.pop(layer, None)
            groups_BMS, fill = state.masks[layer], state.fills.get(layer)
        if call.observer is not None and notes is not None:
            seen = on_device(entries(layer), states.keys.device)
            call.observer(layer, notes.taken(), states.keys, states.values, notes.scale, seen)
        chunks.finished(layer, entries(layer), groups_BMS, fill)
    return hidden_BMD
