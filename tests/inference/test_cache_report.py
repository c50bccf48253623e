"""The bytes that are promised are there: all live tensors, before a prompt and after it is packed."""

import gc
import pickle
from dataclasses import asdict, replace
from fractions import Fraction

import pytest
import torch

from subtoken_train.cache.by_sample import sample_shares
from subtoken_train.cache.cache import PackedCache
from subtoken_train.evictions import build_eviction
from subtoken_train.inference.cache_report import account, report
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import decode, open_prompts, prefill
from subtoken_train.kernels.formats import FORMATS
from subtoken_train.ledger.ledger import nominal_ledger
from subtoken_train.ledger.measure import measured_ledger
from subtoken_train.reducers.base import matched_reducer
from subtoken_train.routing import RoutingConfig
from subtoken_train.types import Region
from tests.support.helpers import compress, make_batch
from tests.support.sampling import sampled
from tests.support.text_families import text_batch, text_family
from tests.support.truth_cells import PLAIN_CELL, backbone_of, batch_of, compression_of
from tests.support.truth_models import KV_HEADS, OwnSets

ROUTING = RoutingConfig(num_groups=16, kept_groups=4)
HEADS = 4


def live_bytes() -> int:
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@sampled("kv_dtype", [name for name, form in FORMATS.items() if 4 % form.per_code == 0], every=3)
@sampled("own_sets", [False, True], every=2)
@torch.no_grad()
def test_live_tensors_grow_by_what_is_reported(own_sets, kv_dtype):
    family = text_family(layers=2, num_key_value_heads=HEADS, max_position_embeddings=8192)
    backbone, batch = compress(family, ROUTING, name="quest", keep_ratio=0.25), text_batch([(4096, 30, 0)])
    KV_HEADS[0], token = HEADS, torch.ones(1, 1, dtype=torch.long)
    compression = Compression(OwnSets() if own_sets else None, kv_dtype=kv_dtype)

    def filled():
        cache = PackedCache(family.shape.num_layers)
        return cache, pickle.dumps(prefill(backbone, batch, cache, compression).plan)

    decode(backbone, token, filled()[0])  # what is made once is there
    before = live_bytes()
    cache, plan = filled()
    grown, told = live_bytes() - before, report(backbone, batch, pickle.loads(plan), cache)
    assert told.slack_bytes == told.tail_bytes == 0
    assert grown == pytest.approx(told.total_bytes, rel=0.02)
    if kv_dtype == "model":
        assert grown == pytest.approx(told.ledger.bytes_of(), rel=0.02)
        assert told.payload_bytes == told.ledger.bytes_of(with_index=False)
    if not own_sets:
        assert told.realised_fraction == pytest.approx(0.15625, rel=0.02)
    decode(backbone, token, cache)
    grown, told = live_bytes() - before, report(backbone, batch, pickle.loads(plan), cache)
    assert (told.tail_bytes, told.slack_bytes) == (family.shape.token_bytes, 63 * family.shape.token_bytes)
    assert grown == pytest.approx(told.total_bytes, rel=0.02)


@pytest.mark.parametrize("routing", [None, ROUTING])
@pytest.mark.parametrize("kv_dtype", ["model", "int8"])
def test_an_eviction_is_told_by_the_entries_that_stay(routing, kv_dtype):
    """Counted over layers and heads by hand; what it left is never called all that was promised."""
    family = text_family(layers=2, num_key_value_heads=HEADS)
    backbone, batch = compress(family, routing), text_batch([(60, 5, 0), (40, 5, 0)])
    KV_HEADS[0] = HEADS
    compression, cache = Compression(OwnSets(), 0.5, kv_dtype=kv_dtype), PackedCache(2)
    plan = prefill(backbone, batch, cache, compression).plan
    told = report(backbone, batch, plan, cache, compression)
    kept = 0
    for layer in plan.layers:
        for sample, row in enumerate(layer.entries_BN.tolist()):
            for place, entry in enumerate(row):
                if entry >= 0 and batch.regions_BN[sample, entry] == Region.CONTEXT:
                    kept += int(layer.heads_BNh[sample, place].sum())
    assert told.kept_entries == kept / (100 * HEADS * 2)
    assert 0.4 < told.kept_entries < 0.6
    values = f", {told.realised_fraction:.1%} of its keys and values kept (nominal 62.5% before the eviction)"
    assert f"region: {told.kept_entries:.1%} of its entries{values if routing else ' kept'}; index" in str(told)
    held, name = told.total_bytes - told.slack_bytes, {"model": "float32"}.get(kv_dtype, kv_dtype)
    assert f"KV {held:,} bytes in {name}, {2 * held / told.dense_bytes:.1%} of the full cache in bfloat16" in str(told)
    whole = report(backbone, batch, plan, cache)
    assert whole.kept_entries is None
    assert f"values kept (nominal {whole.nominal_fraction:.1%}); index" in str(whole)


ROUTINGS = {
    "contiguous": RoutingConfig("value_norm", num_groups=16, kept_groups=4),
    "stored fill": RoutingConfig("value_norm", fill="mean"),
    "per_head": RoutingConfig("value_norm", num_groups=8, kept_groups=3, layout="per_head"),
    "global": RoutingConfig("value_norm", num_groups=16, kept_groups=4, budget="global"),
}


def bytes_of(family, routing, chain, budget, cut=None, **options):
    cache = PackedCache(family.shape.num_layers)
    compression = Compression(build_eviction(chain), budget, "bytes", **options)
    torch.manual_seed(1)
    prefill(compress(family, routing, **(cut or {})).eval(), make_batch([(1, 6), (1, 12)]), cache, compression)
    samples = zip(*(sample_shares(layer.blocks, layer.keys) for layer in cache.layers), strict=True)
    return [sum(layer.total_bytes - layer.index_bytes for layer in sample) for sample in samples]


@sampled("chain", ["ada(snapkv)", "expected_attention", "ada(critical(knorm))", "knorm", "streaming_llm"], every=3)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("options", [{}, {"scope": "all"}, {"key_channels": 0.5}])
def test_bytes_are_never_exceeded(tiny_family, routing, chain, options):
    budget = 80_000
    found = bytes_of(tiny_family, ROUTINGS[routing], chain, budget, **options)
    assert max(found) <= budget
    assert min(found) > 0.65 * budget  # heads that choose entries of few groups leave some


@pytest.mark.parametrize("chain", ["streaming_llm", "snapkv"])
def test_layers_below_a_reducers_cut_count_in_full(tiny_family, chain):
    cut = {"name": "fastv", "keep_ratio": 0.5, "stage": "decoder", "layer": 2}
    assert max(bytes_of(tiny_family, ROUTINGS["contiguous"], chain, 75_000, cut)) <= 75_000


LINEAR = RoutingConfig("linear", num_groups=8, kept_groups=2)


def kept(backbone, batch, compression, tokens):
    opened = open_prompts(backbone, batch, PackedCache(3), compression, "query_aware")
    return [int(((part.entries_BN >= 0) & (part.entries_BN < tokens)).sum()) for part in opened.plan.layers]


@sampled(("keep", "unit"), [(0.3, "fraction"), (0.7, "fraction"), (6, "tokens")], every=3)
def test_it_holds_its_arms_bytes_and_less_than_an_entry_more(keep, unit):
    compression = Compression(build_eviction("streaming_llm", sinks=1), keep, unit)
    arm = compress(text_family(), LINEAR, name="quest", keep_ratio=0.5, page_size=4, window=4)
    anchor = compress(text_family(), **asdict(matched_reducer(arm.reducer, LINEAR.token_budget, 3, 40)))
    for tokens in (5, 9, 14, 23, 31, 40):
        batch, reduced = text_batch([(tokens, 4, 0)]), tokens // 2
        ours = max(1, int(reduced * keep + 1e-9)) if unit == "fraction" else min(reduced, keep)
        assert kept(arm, batch, compression, tokens) == [ours] * 3
        assert all(0 <= its - Fraction(5, 8) * ours < 1 for its in kept(anchor, batch, compression, tokens))


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
    beside = len(MIXED) * (shape.num_layers - backbone.cut_layer) * shape.side_bytes if fill == "mean" else 0
    assert sum(layer.fill_bytes for layer in cache.layers) == beside
    assert allocated(cache) == measured.payload_bytes == measured.ledger.bytes_of(with_index=False)
    unfilled = replace(opened.plan, layers=[replace(layer, filled=False) for layer in opened.plan.layers])
    assert measured.ledger.bytes_of() - measured_ledger(unfilled, batch.regions_BN, shape).bytes_of() == beside


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
def test_samples_that_are_chosen_take_theirs_along(selector, eviction):
    """As beam search and ``batch_select_indices`` ask: chosen samples decode as they did, with their own bytes."""
    cell = PLAIN_CELL | {"family": "llava_gqa", "reducer": "fastv_embeds", "selector": selector, "batch": "three_left"}
    backbone, compression = backbone_of(cell), compression_of(cell | {"eviction": eviction, "scope": "context"})
    cache, chosen = PackedCache(backbone.family.shape.num_layers), torch.tensor([2, 0, 0, 1])
    first = prefill(backbone, batch_of(cell), cache, compression).logits_BV.argmax(-1)[:, None]
    expected = decode(backbone, first, cache)
    before = sum(layer.fill_bytes for layer in cache.layers) // 3
    cache.crop(-1)
    cache.reorder_cache(chosen)
    assert sum(layer.fill_bytes for layer in cache.layers) == 4 * before
    assert (decode(backbone, first[chosen], cache) - expected[chosen]).abs().max() < 1e-4
    assert (before > 0) == (selector == "mean")
