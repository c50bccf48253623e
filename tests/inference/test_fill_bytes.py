"""What dropped groups read as: the bytes that are counted are those that are allocated, everywhere they are counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from subtoken_train.cache.cache import PackedCache
from subtoken_train.evictions import build_eviction
from subtoken_train.inference.cache_report import account, report
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import decode, prefill
from subtoken_train.ledger.ledger import nominal_ledger
from subtoken_train.ledger.measure import measured_ledger
from subtoken_train.routing import RoutingConfig
from tests.support.helpers import compress, make_batch
from tests.support.truth_cells import PLAIN_CELL, backbone_of, batch_of, compression_of

MIXED = [(1, 9), (2, 7), (0, 12)]
FASTV = {"name": "fastv", "keep_ratio": 0.5}
COMPRESSIONS = {
    "none": Compression(),
    "snapkv": Compression(build_eviction("snapkv"), 0.5),
    "ada": Compression(build_eviction("ada(snapkv)"), 0.5),
    "int8": Compression(kv_dtype="int8"),
}


def filled(family, routing, compression=COMPRESSIONS["none"], reducer=FASTV, batch=None):
    torch.manual_seed(0)
    backbone, cache = compress(family, routing, **reducer).eval(), PackedCache(family.shape.num_layers)
    batch = make_batch(MIXED) if batch is None else batch
    return backbone, batch, prefill(backbone, batch, cache, compression), cache


def allocated(cache):
    """Bytes of every tensor of keys, values and fill that the cache itself holds, from their storages."""
    storages = {}
    for layer in cache.layers:
        tensors = [x for block in layer.blocks for payload in block.payloads for x in (payload.data, payload.scale)]
        if layer.fill is not None and layer.fill.stored:
            tensors.append(layer.fill.vectors_Bhd)
        for tensor in tensors:
            if tensor is not None and tensor.numel():
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("fill", ["mean", "zero"])
@pytest.mark.parametrize("stage", ["embeds", "decoder"])
@pytest.mark.parametrize("budget", ["per_token", "global"])
@torch.no_grad()
def test_counted_is_allocated(tiny_family, fill, stage, budget):
    routing = RoutingConfig(num_groups=16, kept_groups=4, fill=fill, budget=budget)
    backbone, batch, opened, cache = filled(tiny_family, routing, reducer={**FASTV, "stage": stage})
    shape, measured = tiny_family.shape, report(backbone, batch, opened.plan, cache)
    routed_layers = shape.num_layers - backbone.cut_layer
    beside = len(MIXED) * routed_layers * shape.side_bytes if fill == "mean" else 0
    assert sum(layer.fill_bytes for layer in cache.layers) == beside
    assert allocated(cache) == measured.payload_bytes == measured.ledger.bytes_of(with_index=False)
    without = measured_ledger(
        replace(opened.plan, layers=[replace(layer, filled=False) for layer in opened.plan.layers]),
        batch.regions_BN,
        shape,
    )
    assert measured.ledger.bytes_of() - without.bytes_of() == beside


@torch.no_grad()
def test_the_nominal_ledger_promises_what_is_measured(tiny_family):
    routing = RoutingConfig(num_groups=64, kept_groups=12, fill="mean")
    backbone, batch, opened, cache = filled(tiny_family, routing, batch=make_batch([(1, 9), (1, 7)]))
    found, tokens = report(backbone, batch, opened.plan, cache), int((batch.regions_BN[0] == 2).sum())
    assert found.nominal_fraction == pytest.approx(found.realised_fraction)
    kept = account(backbone, batch, opened, cache)
    realised = sum(prompt.keys_after + prompt.values_after for prompt in kept) / 2  # as scores of a file have it
    assert realised / sum(prompt.entries_before for prompt in kept) == pytest.approx(found.realised_fraction)
    budget = replace(backbone.group_budget, keep_ratio=0.5)
    assert nominal_ledger(tiny_family.shape, {"visual": tokens}, budget).fraction() == float(budget.total_of(tokens))


@torch.no_grad()
def test_nothing_is_stored_where_nothing_is_dropped(tiny_family):
    """All groups under a gate, and prompts without an image: no piece is missing, so no fill is read."""
    gated = RoutingConfig(num_groups=16, kept_groups=16, value_gate=True, fill="mean")
    for routing, batch in ((gated, make_batch(MIXED)), (RoutingConfig(fill="mean"), make_batch([(0, 8), (0, 6)]))):
        backbone, prompts, opened, cache = filled(tiny_family, routing, batch=batch)
        assert all(layer.fill is None for layer in cache.layers)
        found = report(backbone, prompts, opened.plan, cache)
        assert allocated(cache) == found.payload_bytes == found.ledger.bytes_of(with_index=False)
        backbone.detach()


@pytest.mark.parametrize("selector", ["mean", "gated"])
@pytest.mark.parametrize("eviction", ["none", "own_sets"])
@torch.no_grad()
def test_samples_that_are_chosen_take_theirs_along(selector, eviction):
    """As beam search and ``batch_select_indices`` ask: chosen samples decode as they did, with their own bytes."""
    cell = PLAIN_CELL | {"family": "llava_gqa", "reducer": "fastv_embeds", "selector": selector, "batch": "three_left"}
    backbone = backbone_of(cell)
    cache = PackedCache(backbone.family.shape.num_layers)
    compression = compression_of(cell | {"eviction": eviction, "scope": "context"})
    first = prefill(backbone, batch_of(cell), cache, compression).logits_BV.argmax(-1)[:, None]
    expected = decode(backbone, first, cache)
    before = sum(layer.fill_bytes for layer in cache.layers) // 3
    cache.crop(-1)
    chosen = torch.tensor([2, 0, 0, 1])
    cache.reorder_cache(chosen)
    assert sum(layer.fill_bytes for layer in cache.layers) == 4 * before
    assert (decode(backbone, first[chosen], cache) - expected[chosen]).abs().max() < 1e-4
    assert (before > 0) == (selector == "mean")
