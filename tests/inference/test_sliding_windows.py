"""Layers with sliding windows: what their packed caches hold and read, and what does not go with them."""

from __future__ import annotations

import pytest
import torch

from subtoken_train.cache.cache import PackedCache
from subtoken_train.engine.mixed_heads import mixed_hidden
from subtoken_train.evictions import build_eviction
from subtoken_train.families.lora import LoraSettings, add_lora
from subtoken_train.inference.batched import score_batch
from subtoken_train.inference.cache_report import account, report
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import append, open_prompts
from subtoken_train.routing import RoutingConfig
from tests.support.helpers import compress
from tests.support.text_families import WINDOW, text_batch, text_family
from tests.support.truth_cells import PLAIN_CELL, backbone_of, batch_of

CELL = PLAIN_CELL | {"family": "qwen2_window", "batch": "three_left"}


@torch.no_grad()
def test_what_left_the_window_is_not_stored_and_positions_are_counted():
    backbone, batch = backbone_of(CELL), batch_of(CELL)
    cache = PackedCache(3)
    opened = open_prompts(backbone, batch, cache, Compression(), "query_aware")
    tokens_B = (batch.regions_BN != 0).sum(-1).tolist()
    sizes = [[sum(part.entries for part in block.parts) for block in layer.blocks] for layer in cache.layers]
    assert [set(each) for each in sizes] == [{WINDOW - 1}, set(tokens_B), {WINDOW - 1}]
    assert all(part.position_RM is None for block in cache.layers[1].blocks for part in block.parts)
    found = account(backbone, batch, opened, cache)
    held = sum(layer.payload_bytes + layer.index_bytes for layer in cache.layers)
    assert sum(each.kv_bytes for each in found) == held
    side = 2 * backbone.family.shape.side_bytes
    for each, tokens in zip(found, tokens_B, strict=True):
        assert each.dense_kv_bytes == side * (tokens + 2 * (WINDOW - 1))
        assert each.kv_bytes >= each.dense_kv_bytes + 2 * 4 * (WINDOW - 1)
        assert each.entries_before == each.entries_after


@pytest.mark.parametrize("eviction", ["snapkv", "h2o", "kvzip", "kvcompose"])
@torch.no_grad()
def test_budgets_are_shares_of_what_is_still_seen(eviction):
    backbone, batch = backbone_of(CELL), batch_of(CELL)
    cache = PackedCache(3)
    compression = Compression(build_eviction(eviction), 0.5, scope="all")
    plan = open_prompts(backbone, batch, cache, compression, "query_aware").plan
    heads_Bh = [layer.heads_BNh.sum(1) if layer.heads_BNh is not None else None for layer in plan.layers]
    for layer in (0, 2):
        kept = (plan.layers[layer].entries_BN >= 0).sum(-1)[:, None] if heads_Bh[layer] is None else heads_Bh[layer]
        if eviction in ("snapkv", "h2o"):  # heads or layers of the others share a budget
            assert bool((kept <= WINDOW // 2).all())
        assert bool((kept >= 1).all())


def held_bytes(cache):
    """Bytes of every tensor to which an object of the layers leads, each storage once."""
    storages, known, left = {}, set(), list(cache.layers)
    while left:
        thing = left.pop()
        if isinstance(thing, torch.Tensor):
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, list | tuple | dict):
            left += thing.values() if isinstance(thing, dict) else thing
        elif hasattr(thing, "__dict__") and id(thing) not in known:
            known.add(id(thing))
            left += vars(thing).values()
    return sum(storages.values())


@pytest.mark.parametrize("name", ["mistral_window", "qwen2_window", "ministral3", "llama"])
@torch.no_grad()
def test_every_byte_that_layers_hold_is_reported(name):
    """Prompts of unlike lengths, before a token is decoded, after it, and after an answer of several tokens."""
    backbone, batch = compress(text_family(name)).eval(), text_batch([(40, 6, 0), (21, 4, 0)])
    compression, cache = Compression(build_eviction("knorm"), 0.5, scope="all", kv_dtype="int8"), PackedCache(3)
    opened = open_prompts(backbone, batch, cache, compression, "query_aware")
    for tokens in (0, 1, 5):
        if tokens:
            append(backbone, torch.ones(2, tokens, dtype=torch.long), cache)
        told = report(backbone, batch, opened.plan, cache, compression)
        assert held_bytes(cache) == told.total_bytes


@torch.no_grad()
def test_a_cropped_cache_sees_again_what_had_left_the_window():
    backbone, batch = backbone_of(CELL), batch_of(CELL)
    long, short = list(range(10, 40)), list(range(12, 20))
    one, two = (score_batch(backbone, batch, [order] * 3) for order in ([long, short], [short]))
    for both, alone in zip(one, two, strict=True):
        assert both.logprobs[1] == pytest.approx(alone.logprobs[0], abs=1e-4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"eviction": build_eviction("quest_steps"), "keep": 0.5}, "eviction 'quest_steps' does not go with"),
        ({"eviction": build_eviction("snapkv"), "keep": 0.5, "rerotate": True}, "rerotate does not go with"),
        ({"eviction": build_eviction("h2o"), "keep": 64, "unit": "tokens", "every": 8}, "eviction_every=8 does not go"),
    ],
)
def test_what_does_not_go_with_windows_is_refused(settings, words):
    family = text_family("mistral_window")
    with pytest.raises(ValueError, match=f"{words}.*sliding windows of mistral"):
        Compression(**settings).check(family)
    with pytest.raises(ValueError, match="mistral has sliding windows, and alphas of heads"):
        mixed_hidden(family, torch.zeros(1, 4, 64), torch.arange(4)[None], None)
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    family = text_family(layers=1, rope_parameters=scaled, max_position_embeddings=64)
    with pytest.raises(ValueError, match="positions of kind 'dynamic': their angles depend on a prompt's length"):
        Compression(build_eviction("knorm"), 0.5, rerotate=True).check(family)


def test_training_in_a_window_gives_gradients_and_no_nan():
    family, quest = text_family("qwen2_window"), {"keep_ratio": 0.5, "page_size": 4, "window": 4}
    add_lora(family, LoraSettings(rank=2, dropout=0.0))
    backbone = compress(family, RoutingConfig(num_groups=8, kept_groups=6), name="quest", **quest)
    batch = text_batch([(40, 8, 6), (24, 5, 3)], pad_left=True)
    result = backbone.run(batch)
    backbone.logits(result)[result.labels(batch.labels_BN) >= 0].square().mean().backward()
    moved = [p.grad for p in family.model.parameters() if p.grad is not None]
    assert moved
    assert all(bool(grad.isfinite().all()) for grad in moved)
