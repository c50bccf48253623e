"""Budgets in bytes under routing, never exceeded and used; and evictions of matched anchors."""

from __future__ import annotations

from dataclasses import asdict
from fractions import Fraction

import pytest
import torch

from subtoken_train.cache.by_sample import sample_shares
from subtoken_train.cache.cache import PackedCache
from subtoken_train.evictions import build_eviction
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.eviction_pass import prompt_bytes
from subtoken_train.inference.prefill import open_prompts, prefill
from subtoken_train.ledger.kv_budget import KVBudget, KVShape
from subtoken_train.reducers.base import matched_reducer
from subtoken_train.routing import RoutingConfig
from tests.support.helpers import compress, make_batch
from tests.support.sampling import sampled
from tests.support.text_families import text_batch, text_family

ROUTINGS = {
    "contiguous": RoutingConfig("value_norm", num_groups=16, kept_groups=4),
    "per_head": RoutingConfig("value_norm", num_groups=8, kept_groups=3, layout="per_head"),
    "global": RoutingConfig("value_norm", num_groups=16, kept_groups=4, budget="global"),
}
CHAINS = ["ada(snapkv)", "expected_attention", "ada(critical(knorm))", "knorm", "streaming_llm"]


def bytes_of(family, routing, chain, budget, **options):
    cache = PackedCache(family.shape.num_layers)
    compression = Compression(build_eviction(chain), budget, "bytes", **options)
    torch.manual_seed(1)
    prefill(compress(family, routing).eval(), make_batch([(1, 6), (1, 12)]), cache, compression)
    shares = [sample_shares(layer.blocks, layer.keys) for layer in cache.layers]
    samples = zip(*shares, strict=True)
    return [sum(layer.total_bytes - layer.index_bytes for layer in sample) for sample in samples]


@sampled("chain", CHAINS, every=3)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("options", [{}, {"scope": "all"}, {"key_channels": 0.5}])
def test_bytes_are_never_exceeded(tiny_family, routing, chain, options):
    budget = 80_000
    found = bytes_of(tiny_family, ROUTINGS[routing], chain, budget, **options)
    assert max(found) <= budget
    assert min(found) > 0.65 * budget  # heads that choose entries of few groups leave some


@pytest.mark.parametrize("routed", [True, False])
def test_one_set_for_all_heads_takes_as_much_as_the_same_set_in_each(routed):
    """Also in a layer that does not route, as those below a reducer's cut: 4 heads of 8 channels, fp32."""
    shape, keep = KVShape(2, 4, 8, 4), torch.tensor([[[True, False, True, True, False, False]]])
    masks, cuts = [torch.ones(1, 6, 8, dtype=torch.bool) if routed else None], [torch.zeros(1, 6, dtype=torch.bool)]
    for kept in (keep, keep.expand(1, 4, 6)):
        assert prompt_bytes([kept], masks, cuts, KVBudget(), shape, "contiguous").tolist() == [3 * 4 * 16 * 4]


@pytest.mark.parametrize("chain", ["streaming_llm", "snapkv"])
def test_layers_below_a_reducers_cut_count_in_full(tiny_family, chain):
    cache = PackedCache(tiny_family.shape.num_layers)
    cut = {"name": "fastv", "keep_ratio": 0.5, "stage": "decoder", "layer": 2}
    backbone = compress(tiny_family, ROUTINGS["contiguous"], **cut).eval()
    prefill(backbone, make_batch([(1, 6), (1, 12)]), cache, Compression(build_eviction(chain), 75_000, "bytes"))
    shares = [sample_shares(layer.blocks, layer.keys) for layer in cache.layers]
    found = [sum(part.total_bytes - part.index_bytes for part in sample) for sample in zip(*shares, strict=True)]
    assert max(found) <= 75_000


ROUTING = RoutingConfig("linear", num_groups=8, kept_groups=2)
EACH = Fraction(5, 8)


def kept(backbone, batch, compression, tokens):
    opened = open_prompts(backbone, batch, PackedCache(3), compression, "query_aware")
    return [int(((part.entries_BN >= 0) & (part.entries_BN < tokens)).sum()) for part in opened.plan.layers]


@sampled(("keep", "unit"), [(0.3, "fraction"), (0.7, "fraction"), (6, "tokens")], every=3)
@torch.no_grad()
def test_it_holds_its_arms_bytes_and_less_than_an_entry_more(keep, unit):
    compression = Compression(build_eviction("streaming_llm", sinks=1), keep, unit)
    arm = compress(text_family(), ROUTING, name="quest", keep_ratio=0.5, page_size=4, window=4)
    anchor = compress(text_family(), **asdict(matched_reducer(arm.reducer, ROUTING.token_budget, 3, 40)))
    for tokens in (5, 9, 14, 23, 31, 40):
        batch, reduced = text_batch([(tokens, 4, 0)]), tokens // 2
        ours = max(1, int(reduced * keep + 1e-9)) if unit == "fraction" else min(reduced, keep)
        assert kept(arm, batch, compression, tokens) == [ours] * 3
        assert all(0 <= its - EACH * ours < 1 for its in kept(anchor, batch, compression, tokens))


@torch.no_grad()
def test_a_reducer_that_matches_nothing_rounds_its_own_count():
    family = text_family()
    backbone = compress(family, name="quest", keep_ratio=0.3125, round_up=True, page_size=4, window=4)
    half = Compression(build_eviction("streaming_llm", sinks=1), 0.5, round_up=True)
    assert kept(backbone, text_batch([(23, 4, 0)]), half, 23) == [4] * 3  # 8 of 23, and half of them
