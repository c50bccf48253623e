"""A matched anchor under an eviction: its arm's bytes in every layer, and less than an entry more."""

from __future__ import annotations

from dataclasses import asdict
from fractions import Fraction

import torch

from subtoken_train.cache.cache import PackedCache
from subtoken_train.evictions import build_eviction
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import open_prompts
from subtoken_train.reducers.base import matched_reducer
from subtoken_train.routing import RoutingConfig
from tests.support.helpers import compress
from tests.support.sampling import sampled
from tests.support.text_families import text_batch, text_family

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
