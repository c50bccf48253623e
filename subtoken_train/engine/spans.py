"""Run a stretch of decoder layers on a batch's rows: all rows at once, or a chunk of rows at a time.

In chunks, all rows of a prompt run through a layer before the next layer begins: exact, and what is wide (MLP, masks)
exists for a chunk alone. What a layer decides from all of its rows is decided before they run, from projections of the
whole layer's input, which run twice then.

Legend: B batch, N or M rows, D model width, S value groups, H query heads, h key-value heads, d head width.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from subtoken_train.engine.attention import ContextSplit, runs_sdpa
from subtoken_train.engine.modes import InputObserver, watching_inputs
from subtoken_train.engine.prompt_pass import Rows, protected_rows
from subtoken_train.families.family import Family
from subtoken_train.functional.causal_attention import Seen
from subtoken_train.functional.gather import on_device, take_rows
from subtoken_train.functional.hashing import sample_seeds
from subtoken_train.reducers.base import PositionPolicy
from subtoken_train.routing.bank import RoutingState
from subtoken_train.types import Batch, Region

LayerFinished = Callable[[int, Rows, Tensor | None, Tensor | None, Tensor | None], None]
"""Called with (layer, rows, kept groups [B, N, S], what dropped ones read as, kept keys [B, h, N]) once a layer's dense
keys and values are in the cache; its rows' region is PADDING where they are no entry. May take them out of it."""


@dataclass(frozen=True)
class Chunks:
    """Settings of a pass in chunks of ``size`` rows; ``between`` is called after each, and may use the model."""

    size: int
    finished: LayerFinished
    between: Callable[[], None] | None = None


PromptObserver = Callable[[int, Tensor, Tensor, Tensor, float, Rows], None]
"""Called with (layer, query, key, value, scale, rows) after each layer's attention.

``rows`` are the layer's, on its device, their region PADDING where a row is no entry of its cache.
"""


@dataclass
class RunningPass:
    """One pass over a batch, which its stages hand on."""

    batch: Batch
    cache: Cache | None
    pad_left: bool
    observer: PromptObserver | None
    inputs: InputObserver | None
    chunks: Chunks | None  # none: all rows at once
    acts: bool
    hidden_BMD: Tensor = field(init=False)
    """States of the rows: their embeddings, then the output of the last layer that ran."""
    rows: Rows = field(init=False)  # the rest of the batch
    embeds_BND: Tensor = field(init=False)  # input embeddings of the unreduced sequence
    rank_BN: Tensor | None = None
    """The reducer's rank of its rows, int64, 0 where a row is gone; None where it ranks nothing."""
    split: ContextSplit | None = None
    state: RoutingState | None = None  # input and notes of the routers; None in layers without routing
    spans: list[tuple[int, int, Rows]] = field(default_factory=list)  # (first layer, last + 1, rows) of what ran

    @cached_property
    def protected(self) -> Tensor:
        """Rows of the batch that no reducer drops, bool [B, N]."""
        return protected_rows(self.batch)

    @cached_property
    def sample_seeds(self) -> Tensor:
        """A number per sample, int64 [B]."""
        return sample_seeds(self.batch.record_ids, self.batch.regions_BN.device)

    def keep(self, hidden: Tensor, keep_BM: Tensor, policy: PositionPolicy = "original") -> None:
        """Go on with the kept rows of ``hidden``."""
        self.rows, index = self.rows.take(keep_BM, self.pad_left, policy)
        self.hidden_BMD = take_rows(hidden, index)

    def entries(self, layer: int, window: int | None) -> Rows:
        """Return the rows as a layer's cache holds them: the region of one that is no entry is PADDING."""
        rows = self.rows
        if self.split is not None:
            seen_BM = self.split.seen[layer].to(rows.regions_BM.device)
            rows = replace(rows, regions_BM=rows.regions_BM.masked_fill(~seen_BM, Region.PADDING))
        return rows.in_window(window)


def run_span(family: Family, run: RunningPass, start: int, stop: int) -> Tensor:
    """Run layers ``start`` to ``stop`` (exclusive) on the rows that are left, shown to its observer, [B, M, D]."""
    if run.chunks is not None:
        return _in_chunks(family, run, run.chunks, range(start, stop))
    rows, split, watch = run.rows, run.split, run.observer
    options: dict[str, Any] = {} if split is None else {"context_split": split}
    if watch is not None:

        def observe(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
            value = value if split is None else split.routed.get(layer, value)
            watch(layer, query, key, value, scale, on_device(run.entries(layer, family.windows[layer]), query.device))

        options["observer"] = observe
    given = run.hidden_BMD, rows.visible_BM, rows.position, run.cache, start, stop, rows.deep_nBMD
    with watching_inputs(family, run.inputs):
        return family.run_layers(*given, **options)


@torch.no_grad()
def _in_chunks(family: Family, run: RunningPass, chunks: Chunks, layers: range) -> Tensor:
    hidden_BMD, rows, split, state, cache = run.hidden_BMD, run.rows, run.split, run.state, run.cache
    assert cache is not None
    del run.hidden_BMD  # the caller's is what is returned: the first layer's input goes when it has run
    for layer in layers:
        look_ahead(family, layer, hidden_BMD, rows.position, split, state)
        if run.inputs is not None:
            run.inputs(layer, family.attention_input(layer, hidden_BMD))
        queries: list[Tensor] | None = None if run.observer is None else []
        given = hidden_BMD, rows.visible_BM, rows.position, chunks.size, queries, split, state, rows.deep_nBMD
        # a stretch's input is left as it is, and so is what an observer of inputs may hold
        into = None if layer == layers[0] or run.inputs is not None else hidden_BMD
        hidden_BMD = run_chunks(family, cache, layer, *given, unpadded=rows.unpadded, between=chunks.between, into=into)
        states, groups_BMS, fill, keys_BhM = cache.layers[layer], None, None, None
        if split is not None:
            del split.ahead[layer]
            states.values = split.routed.pop(layer, states.values)
        if state is not None:
            del state.ahead[layer]
            state.choices.pop(layer, None)
            groups_BMS, fill, keys_BhM = state.groups(layer), state.fills.get(layer), state.keys.get(layer)
        entries = run.entries(layer, family.windows[layer])
        if run.observer is not None and queries is not None:
            seen, scale = on_device(entries, states.keys.device), family.decoder.layers[layer].self_attn.scaling
            run.observer(layer, queries.pop(), states.keys, states.values, scale, seen)
        chunks.finished(layer, entries, groups_BMS, fill, keys_BhM)
    return hidden_BMD


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
    attention, normed_BND = family.decoder.layers[layer].self_attn, family.attention_input(layer, hidden_BND)
    chosen = None
    if split is not None and split.reducer is not None:  # before the values: a fused projection makes all three
        query_BHNd = family.query_heads(layer, normed_BND, position)
        angles = family.angles(layer, normed_BND, position)
        chosen = family.rotate(layer, query_BHNd, family.key_heads(layer, normed_BND), angles)
    value_BND = family.projection(layer, "v")(normed_BND)  # whose hook routes, or defers
    if state is not None:
        state.ahead[layer] = value_BND
    if split is not None:
        value_BhNd = torch.unflatten(value_BND, -1, (-1, attention.head_dim)).transpose(1, 2)
        query_BHNd, key_BhNd = chosen or (value_BhNd, value_BhNd)  # of no account where nothing chooses
        here = split.on(value_BND.device)
        split.ahead[layer] = here.decide(layer, query_BHNd, key_BhNd, value_BhNd, attention.scaling)


def run_chunks(
    family: Family,
    cache: Cache,
    layer: int,
    hidden_BND: Tensor,
    seen_BN: Tensor,
    position: Tensor,
    size: int,
    queries: list[Tensor] | None = None,
    split: ContextSplit | None = None,
    state: RoutingState | None = None,
    deep_nBND: Tensor | None = None,
    earlier_BM: Tensor | None = None,
    unpadded: bool = False,
    between: Callable[[], None] | None = None,
    into: Tensor | None = None,
    keys_BhN: Tensor | None = None,
) -> Tensor:
    """Return one layer's output for rows that stand after what its cache holds, [B, n, D].

    Args:
        seen_BN: what may be seen, bool: of the cache's rows first, then of these.
        queries: takes the rotated queries of all rows, [B, H, n, d].
        earlier_BM: positions of the cache's rows, in a layer with a window; None: it holds none yet.
        unpadded: all of ``seen_BN`` is known to be seen; then no mask is made where none is needed.
        between: called after each chunk.
        keys_BhN: of what is seen, the rows whose key a head has, bool; None: each head has all.
        into: takes the output; may be ``hidden_BND``, of which a chunk reads its own rows alone.
    """
    before, out_BND = seen_BN.shape[1] - hidden_BND.shape[1], torch.empty_like(hidden_BND) if into is None else into
    options: dict[str, Any] = {} if split is None else {"context_split": split}
    if queries is not None:

        def note(layer: int, query: Tensor, *_: Any) -> None:
            if not queries:
                queries.append(query.new_empty(*query.shape[:2], hidden_BND.shape[1], query.shape[3]))
            queries[0][:, :, part] = query

        options["observer"] = note
    window = family.window(layer, position if earlier_BM is None else torch.cat([earlier_BM, position], -1))
    all_seen = Seen(None if unpadded else seen_BN, window, keys_BhN)
    for start in range(0, hidden_BND.shape[1], size):
        part = slice(start, min(start + size, hidden_BND.shape[1]))
        if state is not None:
            state.part = part.start, part.stop
        rows, places = hidden_BND[:, part], position[..., part]
        deep = None if deep_nBND is None else deep_nBND[:, :, part]
        if runs_sdpa(family.decoder.config):
            options["seen"], block = all_seen.until(before + part.stop), family.decoder.layers[layer]
            out_BND[:, part] = family.through([block], rows, None, places, cache, deep, **options)
        else:
            given = rows, seen_BN[:, : before + part.stop], places, cache, layer, layer + 1, deep
            out_BND[:, part] = family.run_layers(*given, **options)
        if between is not None:
            between()
    return out_BND
