"""Run prompts, compress their cache, pack it, and append to it.

A prompt comes in whole (``query_aware``), or its context first, before the question is seen (``context_first``): then
reducer, routers and eviction see a prompt's context alone (up to and including the last visual token, or the end of the
CONTEXT region), and the rest is appended as it is, at its own positions.

Legend: B batch, N positions of prompts or entries of a plan, M rows of the pass, q appended tokens, D model width, V
vocabulary.
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor

from subtoken_train.cache.cache import PackedCache
from subtoken_train.cache.pack import PageReading, with_pages
from subtoken_train.engine.attention import use_packed_attention
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.engine.modes import watching_inputs
from subtoken_train.engine.prompt_pass import PromptPass, Rows, are_finite, check_logits, layer_plan
from subtoken_train.engine.second_pass import second_pass
from subtoken_train.engine.spans import Chunks
from subtoken_train.errors import SubTokenWarning, check_together, check_word, no_numbers, refuse
from subtoken_train.evictions.kvzip import TrainedGates
from subtoken_train.evictions.thresholds import Threshold
from subtoken_train.families.positions import position_bound, warn_beyond
from subtoken_train.functional.gather import each_tensor, kept_index, on_device, take_rows
from subtoken_train.functional.objective import IGNORE_INDEX
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.decode_step import captured_step, next_logits, run_step, warn_of_positions
from subtoken_train.inference.eviction_pass import EvictionPass
from subtoken_train.inference.layer_packer import LayerPacker
from subtoken_train.inference.online_eviction import evict_while_decoding
from subtoken_train.kernels.choice import choose_kernel
from subtoken_train.routing import RoutingConfig
from subtoken_train.types import Batch, Plan, Protocol, Region, before_compressed_ends


def check_choices(backbone: CompressedBackbone, compression: Compression) -> None:
    """Raise ``ValueError`` if two parts would choose the same: pages or a byte budget, and another."""
    says, routing = compression.said, backbone.active_routing
    spends = "budget 'bytes' of the routers" if routing is not None and routing.budget == "bytes" else ""
    reads, groups = says["reads"], "" if routing is None else "value groups"
    held = compression.unit == "bytes" and f"eviction_keep={int(compression.keep)} bytes"
    check_together(
        (reads, held, "it frees no bytes; say how much a step reads, a share such as 0.25 or a number of tokens"),
        (reads, says["merges"], "it drops nothing that could be merged"),
        (reads, says["cuts"], "it reads pages of whole keys"),
        (reads, groups, "it reads pages of whole values; use an arm without routing (selector none)"),
        (says["evicts"] or says["cuts"], spends, "that chooses among the keys already; use an arm of another budget"),
    )


def with_gates(backbone: CompressedBackbone, compression: Compression) -> Compression:
    """Return a compression joined by the eviction that a backbone's gates decide; the same where it has none."""
    bank, method = backbone.bank, compression.eviction
    if bank is None or not bank.gated or isinstance(method, TrainedGates):
        return compression
    both = method and f"the adapter's gates say already what stays, and so does eviction {method.name!r}"
    refuse((both, f"{both}: leave eviction and eviction_keep out, or use the backbone without the adapter"))
    return replace(compression, eviction=TrainedGates(bank.gate_logits), threshold=Threshold(0.0, bank.config.window))


def who_drops(routing: RoutingConfig | None, compression: str) -> list[str]:
    """Return what may empty a region, the routers or a compression of that label, and what to do about it."""
    if routing is not None and routing.budget == "bytes":
        return [routing.size, "Raise byte_share or sinks"]
    return [compression]


def add_pages(cache: PackedCache, plan: Plan, eviction: EvictionPass) -> None:
    """Add a page index to the layers of a filled cache of which a step of decoding reads pages."""
    paged = []
    for layer, (packed, kept) in enumerate(zip(cache.layers, plan.layers, strict=True)):
        sizes = eviction.method.pages(layer)
        if sizes is not None:
            assert kept.rows_BN is not None
            competes_BM, budget_B = eviction.budgets[layer]
            marks = on_device([take_rows(competes_BM, kept.rows_BN) & (kept.entries_BN >= 0), budget_B], packed.device)
            paged += [(packed, block, PageReading(*sizes, *marks)) for block in packed.blocks]
            packed.blocks = []
    for (packed, *_), blocks in zip(paged, with_pages([each[1:] for each in paged]), strict=True):
        packed.blocks += blocks


@dataclass(frozen=True)
class Prefill:
    """Results of compressing prompts; ``regions_BM`` are of the part that was compressed, which the plan counts in."""

    logits_BV: Tensor
    plan: Plan
    regions_BM: Tensor


@torch.no_grad()
def prefill(
    backbone: CompressedBackbone,
    prompts: Batch,
    cache: PackedCache,
    compression: Compression,
    between: Callable[[], None] | None = None,
) -> Prefill:
    """Run a batch of prompts once, with reducer and routers, and fill ``cache`` with what stays.

    The eviction acts after the whole pass: the next token's logits are those of the unevicted cache. Dense keys and
    values exist until their layer is packed: those of all layers, in chunks (``Compression.prefill_chunk``) those of
    one. ``between`` is called after each chunk of a layer, and may decode from other caches.
    """
    family, compression = backbone.family, with_gates(backbone, compression)
    config = family.decoder.config
    check_before_prefill(backbone, prompts, compression)
    bound = position_bound(config)
    if bound is not None and prompts.input_ids_BN.shape[1] > bound:  # of a picture positions are fewer under mRoPE
        shown_BN = prompts.regions_BN != Region.PADDING
        warn_beyond(config, int(family.positions(prompts).masked_fill(~shown_BN, -1).max()) + 1)
    use_packed_attention(config)
    eviction = None
    if compression.eviction is not None:
        eviction = EvictionPass(compression, family, prompts, backbone.reducer, backbone.group_budget)
    packer = LayerPacker(backbone, compression, cache, prompts.input_ids_BN.shape[1])
    try:
        if compression.prefill_chunk is None:
            result = run_whole(backbone, prompts, eviction, packer)
            plan = pack_whole(result, eviction, packer)
        else:
            result, plan = _chunked(backbone, prompts, eviction, packer, between)
    except torch.OutOfMemoryError:
        raise
    except (AssertionError, RuntimeError) as error:  # as statistics of NaN fail in many ways
        held = [each for layer in packer.dense.layers for each in (layer.keys, layer.values) if each is not None]
        if not all(map(bool, [*map(are_finite, held), *(() if eviction is None else eviction.finite)])):
            raise no_numbers(f"for {prompts.record_ids[0][:80]!r}", backbone.model.dtype) from error
        raise
    if eviction is not None:
        eviction.check_threshold(prompts.record_ids)
        if compression.every is not None:
            evict_while_decoding(cache, eviction, plan, prompts.record_ids)
        if eviction.method.reads:
            add_pages(cache, plan, eviction)
    packer.make_ready(result.rows.next_position.to(prompts.regions_BN.device))
    visible_BM = result.rows.visible_BM
    last_B1 = (visible_BM * torch.arange(visible_BM.shape[1], device=visible_BM.device)).argmax(-1, keepdim=True)
    logits_BV = next_logits(backbone, take_rows(result.hidden_BMD, last_B1))
    check_logits(logits_BV, prompts.record_ids)
    return Prefill(logits_BV, plan, prompts.regions_BN)


def check_before_prefill(backbone: CompressedBackbone, prompts: Batch, compression: Compression) -> None:
    """Raise a worded ``ValueError`` where ``prefill`` refuses."""
    unseen = prompts.pixel_values is None and bool((prompts.regions_BN == Region.VISUAL).any())
    refuse((unseen, "the prompts have visual tokens but no pixels, which a cache frees; build the batch again"))
    compression.check(backbone.family)
    compression.check_prompts(prompts)
    choose_kernel(prompts.regions_BN.device.type)  # a forced path that cannot run
    check_choices(backbone, compression)


def run_whole(
    backbone: CompressedBackbone, prompts: Batch, eviction: EvictionPass | None, packer: LayerPacker
) -> PromptPass:
    """Run all layers, and the eviction's second pass after them; the packer's dense cache is filled."""
    family, dense = backbone.family, packer.dense
    result = backbone.run(prompts, cache=dense, pad_left=True, **_watching(eviction, packer))
    if eviction is None:
        return result
    bound, start, method = position_bound(family.decoder.config), result.rows.next_position, eviction.method
    for task in eviction.tasks:
        with family.as_long_as(start):  # its keys are turned as the prompt's are
            rows = second_pass(family, dense, result, task, eviction.observe_task, "slopes" in method.needs)
        if bound is not None and int(start.max()) <= bound <= int(rows.position.max()):
            words = f"eviction {method.name!r} runs further rows after a prompt to score it, past the {bound:,}"
            after = "positions that the model was made for; it continues, but may choose worse"
            advice = f"shorten the context, or {method.second_pass_advice}"
            warnings.warn(f"{words} {after}; {advice}", SubTokenWarning, stacklevel=1)  # one place, whoever asks
    return result


def pack_whole(result: PromptPass, eviction: EvictionPass | None, packer: LayerPacker) -> Plan:
    """Plan what stays of a pass, and pack each layer."""
    masks = [result.groups().get(layer) for layer in range(len(result.layer_rows()))]
    kept_LBhM = result.entries() if eviction is None else eviction.keep(masks, packer.packing.layout)
    plan = result.plan(kept_LBhM)
    counts, fills = packer.counts(plan.layers), result.fills()
    for layer, (rows, regions_BM) in enumerate(result.layer_rows()):
        entries = plan.layers[layer], kept_LBhM[layer], regions_BM != Region.PADDING
        packer.pack(layer, *entries, rows.position, counts[layer], fills.get(layer))
    return plan


def _chunked(
    backbone: CompressedBackbone,
    prompts: Batch,
    eviction: EvictionPass | None,
    packer: LayerPacker,
    between: Callable[[], None] | None,
) -> tuple[PromptPass, Plan]:
    size, plan = packer.compression.prefill_chunk, Plan([], packer.packing.layout)
    assert size is not None

    def finished(
        layer: int, rows: Rows, groups_BMS: Tensor | None, fill_BV: Tensor | None, keys_BhM: Tensor | None
    ) -> None:
        entries_BM = rows.regions_BM != Region.PADDING
        keep_BhM = entries_BM[:, None]
        if keys_BhM is not None and backbone.active_routing is not None:
            keep_BhM = keep_BhM & keys_BhM
        groups_BMS = None if backbone.active_routing is None else groups_BMS
        if eviction is not None:
            (keep_BhM,) = eviction.keep([groups_BMS], packer.packing.layout)
            eviction.scores.clear()  # the next layer is kept alone
            eviction.rows.clear()
        wide = layer_plan(keep_BhM, groups_BMS, rows.index_BM, keep_BhM.shape[2])
        (counts,) = packer.counts([wide], layer)
        plan.layers.append(each_tensor(wide, lambda places: places[:, : counts.longest].clone()))
        packer.pack(layer, plan.layers[layer], keep_BhM, entries_BM, rows.position, counts, fill_BV)

    given: dict[str, Any] = {"chunks": Chunks(size, finished, between), **_watching(eviction, packer)}
    return backbone.run(prompts, cache=packer.dense, pad_left=True, **given), plan


def _watching(eviction: EvictionPass | None, packer: LayerPacker) -> dict[str, Any]:
    """Return the observers of a prompt's pass: of attention for all who watch, of what layers project."""
    observers = [watch.observe for watch in (eviction, packer.key_cut, packer.moments) if watch is not None]

    def observe(*layer: Any) -> None:
        for observer in observers:
            observer(*layer)

    return {"observer": observe if observers else None, "inputs": None if eviction is None else eviction.inputs}


@torch.no_grad()
def append(
    backbone: CompressedBackbone,
    token_ids_Bq: Tensor,
    cache: PackedCache,
    padding_B: Tensor | None = None,
    chooses_pages: bool = False,
) -> Tensor:
    """Append tokens to a filled cache; their hidden states before the final norm, [B, q, D].

    Past the positions that the model was made for it warns, once a sequence. ``padding_B`` of the tokens are padding on
    the left, int64, right after the prompt; a single token may choose the pages that it reads.
    """
    family = backbone.family
    cache.free_shape()
    assert cache.next_position is not None
    if cache.evictor is not None:
        cache.evictor.before_append(cache)
    use_packed_attention(family.decoder.config)
    warn_of_positions(backbone, cache, token_ids_Bq.shape[1], padding_B)
    if padding_B is not None:
        for layer in cache.layers:
            assert layer.tail_length == 0
            layer.tail_start_B = padding_B.to(layer.device)
        cache.next_position = cache.next_position - padding_B[:, None]
    cache.choose_pages(chooses_pages)
    with cache.appending(), watching_inputs(family, cache.input_observer):
        return run_step(backbone, token_ids_Bq, cache)


def decode(backbone: CompressedBackbone, token_ids_Bq: Tensor, cache: PackedCache) -> Tensor:
    """Append tokens, return the next logits, [B, V], good until the next token; one alone chooses its pages."""
    alone = token_ids_Bq.shape[1] == 1
    if alone and (step := captured_step(backbone, cache)) is not None:
        return step(token_ids_Bq, cache)
    return next_logits(backbone, append(backbone, token_ids_Bq, cache, chooses_pages=alone))


@torch.no_grad()
def decode_joined(
    backbone: CompressedBackbone, token_ids_B1: Tensor, caches: Sequence[PackedCache], captures: bool = False
) -> Tensor:
    """Append a token to each of several caches of one row in one pass; the next logits, [B, V], until the next token.

    Their lengths, formats and settings may differ; none may evict while decoding, nor have angles that depend on the
    length: those go alone, through ``decode``. Where the pass fails, no cache has grown. ``captures``: on a GPU these
    caches may be worth a graph; else only one that is there takes them.
    """
    if (step := captured_step(backbone, *caches, captures=captures)) is not None:
        return step(token_ids_B1, *caches)
    lengths = [cache.layers[0].tail_length for cache in caches]
    use_packed_attention(backbone.family.decoder.config)
    with ExitStack() as open_caches:
        for cache in caches:
            assert cache.evictor is None
            cache.free_shape()
            cache.choose_pages(True)
            open_caches.enter_context(cache.appending())
        try:
            return next_logits(backbone, run_step(backbone, token_ids_B1, *caches))
        except BaseException:
            for cache, length in zip(caches, lengths, strict=True):
                for layer in cache.layers:
                    layer.shorten(layer.tail_length - length)
            raise


def reader_of_question(backbone: CompressedBackbone, compression: Compression) -> str | None:
    """Name the part of the compression that reads the question, in words; None: no part does."""
    bank, reducer, method = backbone.bank, backbone.reducer, compression.eviction
    if reducer.acts and reducer.reads_question:
        return f"reducer {reducer.name!r} chooses by the question"
    if bank is not None and backbone.active_routing is not None and bank.reads_query:
        return "the routers are conditioned on the question"
    if method is not None and (method.needs_image or method.reads_question):
        reads = "reads the attention from the question to the image"
        return f"eviction {method.name!r} {reads if method.needs_image else 'scores by the question'}"
    return None


def check_context_first(backbone: CompressedBackbone, compression: Compression) -> None:
    """Raise a worded ``ValueError`` where something that compresses reads the question."""
    reads = reader_of_question(backbone, compression)
    refuse((reads, f"context_first compresses before the question is seen, but {reads}; use query_aware"))


def open_prompts(
    backbone: CompressedBackbone, prompts: Batch, cache: PackedCache, compression: Compression, protocol: Protocol
) -> Prefill:
    """Fill ``cache`` with prompts; under ``context_first`` one without context follows its first token in full."""
    check_word("protocol", protocol, get_args(Protocol))
    if protocol == "query_aware":
        return prefill(backbone, prompts, cache, compression)
    check_context_first(backbone, compression)
    rest_BN = (prompts.regions_BN != Region.PADDING) & ~context_part(prompts.regions_BN)
    for name, asks in zip(prompts.record_ids, rest_BN.any(-1).tolist(), strict=True):
        refuse((not asks, f"context_first: nothing follows the context of {name!r}; a prompt must ask after it"))
    first = prefill(backbone, contexts_of(prompts), cache, compression)
    index_Bq, valid_Bq = kept_index(rest_BN, pad_left=True)
    ids_Bq = take_rows(prompts.input_ids_BN, index_Bq)
    return replace(first, logits_BV=append_rest(backbone, ids_Bq, ~valid_Bq, cache, compression.prefill_chunk))


def append_rest(
    backbone: CompressedBackbone,
    ids_Bq: Tensor,
    padding_Bq: Tensor,
    cache: PackedCache,
    chunk: int | None,
    between: Callable[[], None] | None = None,
) -> Tensor:
    """Append what follows a cache's contexts, ``chunk`` tokens at a time; logits of the next token, [B, V]."""
    padding_B, length = padding_Bq.sum(-1), ids_Bq.shape[1]
    for layer in cache.layers:  # before it is appended, so that nothing is evicted between its chunks
        if layer.eviction_state is not None:
            layer.eviction_state.given = length
    size = chunk or length
    assert cache.next_position is not None
    with backbone.family.as_long_as(cache.next_position - padding_B[:, None] + length):
        hidden = append(backbone, ids_Bq[:, :size], cache, padding_B if bool(padding_B.any()) else None)
        for start in range(size, length, size):
            if between is not None:
                between()
            hidden = append(backbone, ids_Bq[:, start : start + size], cache)
    logits_BV = next_logits(backbone, hidden)
    check_logits(logits_BV, [f"what follows context {b}" for b in range(len(logits_BV))])
    return logits_BV


def context_part(regions_BN: Tensor) -> Tensor:
    """Mark a prompt's tokens up to the last VISUAL or CONTEXT one, bool [B, N]; its first token if it has none."""
    visible_BN = regions_BN != Region.PADDING
    return before_compressed_ends(regions_BN) | (visible_BN & (visible_BN.cumsum(-1) == 1))


def contexts_of(prompts: Batch) -> Batch:
    """Cut prompts down to their contexts, padded on the left; where the prompts rank by a token, the last one ranks."""
    index_BM, valid_BM = kept_index(context_part(prompts.regions_BN), pad_left=True)
    # an id that is no image token, whatever stands at the index that padding points to
    ids_BM = take_rows(prompts.input_ids_BN, index_BM)
    pad_B1 = take_rows(prompts.input_ids_BN, (prompts.regions_BN != Region.VISUAL).int().argmax(-1, keepdim=True))
    return replace(
        prompts,
        input_ids_BN=torch.where(valid_BM, ids_BM, pad_B1),
        labels_BN=torch.full_like(ids_BM, IGNORE_INDEX),
        regions_BN=take_rows(prompts.regions_BN, index_BM).masked_fill(~valid_BM, Region.PADDING),
        rank_position_B=torch.where(prompts.rank_position_B < 0, -1, index_BM.shape[1] - 1),
        followed=True,
    )
