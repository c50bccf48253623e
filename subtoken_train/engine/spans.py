"""A stretch of decoder layers on a batch's rows: whole, or layer after layer in chunks of rows.

Legend: B batch, M rows, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from transformers import Cache

from subtoken_train.engine.chunks import Chunks, QueryNotes, look_ahead, run_chunks
from subtoken_train.engine.context_split import ContextSplit
from subtoken_train.engine.prompt_pass import Rows
from subtoken_train.families.family import Family
from subtoken_train.functional.moving import on_device
from subtoken_train.routing.state import RoutingState
from subtoken_train.types import Batch

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
