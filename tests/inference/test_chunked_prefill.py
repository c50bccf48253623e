"""A prefill in chunks keeps what the whole one keeps, and its cache reads the same."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.nn import functional

from subtoken_train.cache.cache import PackedCache
from subtoken_train.engine import attention
from subtoken_train.evictions import EVICTIONS, build_eviction
from subtoken_train.evictions.thresholds import Threshold
from subtoken_train.inference import layer_packer, prefill
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import decode, open_prompts
from tests.support.sampling import sampled
from tests.support.truth_cells import backbone_of
from tests.support.truth_models import prompts

CELL = {"selector": "none", "layout": "contiguous", "groups": "8/3", "budget": "per_token", "precision": "fp32"}
OWN_BUDGETS = {"budgets": "uniform"}
SETTINGS = {"snapkv": {"window": 4}, "aircache": OWN_BUDGETS, "vl_cache": OWN_BUDGETS, "tgv_kv": OWN_BUDGETS}
METHODS = {name: build_eviction(name, **SETTINGS.get(name, {})) for name in (*EVICTIONS, "ada(h2o)", "critical(tova)")}
BY_LAYER = [name for name, method in METHODS.items() if not (method.across_layers or "second_pass" in method.needs)]


@torch.no_grad()
def opened(backbone, batch, compression, protocol="query_aware", steps=3):
    """The plan's layers, and the logits of the next token and of some more that are the same in all runs."""
    cache = PackedCache(backbone.family.shape.num_layers)
    first = open_prompts(backbone, batch, cache, compression, protocol)
    tokens = torch.randint(10, 60, (steps, len(batch.input_ids_BN), 1), generator=torch.Generator().manual_seed(5))
    return first.plan, torch.stack([first.logits_BV, *(decode(backbone, ids, cache) for ids in tokens)])


def same(one, other):
    return one is other is None or torch.equal(one, other)


def check(cell, batch, method=None, chunks=(7,), protocol="query_aware", scope="context", **further):
    backbone = backbone_of({**CELL, **cell})
    kind, side = batch.split("_")
    batch = prompts(backbone.family, kind, side == "left")
    keep = 0.4 if method and "threshold" not in further else 1.0
    compression = Compression(method, keep, scope=scope, **further)
    plan, logits = opened(backbone, batch, compression, protocol)
    for chunk in chunks:
        found, near = opened(backbone, batch, replace(compression, prefill_chunk=chunk), protocol)
        assert found.layout == plan.layout
        for ours, its in zip(found.layers, plan.layers, strict=True):
            for name in ("entries_BN", "group_mask_BNS", "heads_BNh", "rows_BN"):
                assert same(getattr(ours, name), getattr(its, name)), name
            if its.cut_keys is not None:
                assert torch.equal(ours.cut_keys.channels_Bhd, its.cut_keys.channels_Bhd)
        assert (near - logits).abs().max() < 5e-5


@sampled("family", ["llama", "llava_gqa"], every=2)
@sampled("name", BY_LAYER, every=3)
def test_every_method_keeps_the_same(name, family):
    """Batch of three, grouped heads, an uneven last chunk, one row at a time, and more rows than there are."""
    method = METHODS[name]
    if method.needs_image and family == "llama":
        pytest.skip("needs an image")
    for side, scope in product(("left", "right"), ("context", "all")):
        check({"family": family, "reducer": "none"}, f"three_{side}", method, (7, 16, 500), scope=scope)


@sampled("side", ["left", "right"], every=10)
@sampled(
    ("family", "reducer", "selector", "budget", "method"),
    [
        ("llama", "none", "none", "per_token", None),
        ("llama", "none", "linear", "per_token", "snapkv"),
        ("llama", "quest", "gated", "per_token", None),
        ("mistral_window", "quest", "linear", "global", "snapkv"),
        ("llava_window", "fastv_decoder", "gated", "per_token", "snapkv"),
        ("llava_gqa", "fastv_embeds", "linear", "ranked", "h2o"),
        ("llava_gqa", "fastv_decoder", "gated", "per_token", "snapkv"),
        ("llava", "visionzip", "value_norm", "per_token", "knorm"),
        ("qwen2_5_vl", "fastv_decoder", "none", "per_token", "h2o"),
        ("qwen2_5_vl", "visionzip", "mlp", "global", None),
    ],
    every=4,
)
def test_routers_and_reducers_choose_the_same(monkeypatch, family, reducer, selector, budget, method, side):
    monkeypatch.setattr(attention, "ROW_BLOCK", 5)
    cell = {"family": family, "reducer": reducer, "selector": selector, "budget": budget}
    for kind in ("three", *(["text"] if "ll" in family or family == "qwen2" else [])):
        check(cell, f"{kind}_{side}", None if method is None else METHODS[method], (7, 13))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("family", "selector"), [("llama", "linear"), ("llava_gqa", "gated"), ("qwen2", "none")])
def test_a_context_before_its_question(family, selector, side):
    cell = {"family": family, "reducer": "none", "selector": selector}
    check(cell, f"three_{side}", METHODS["h2o"], (5, 16), "context_first")


THRESHOLDS = {"random": 0.6, "keydiff": -0.2, "tova": -3.0, "expected_attention": -2.9}


@pytest.mark.parametrize("name", THRESHOLDS)
def test_a_threshold_leaves_the_same(name):
    settings = {"expected_attention": {"sinks": 1, "future": 8}}.get(name, {})
    cell = {"family": "llama", "reducer": "none"}
    check(cell, "three_left", build_eviction(name, **settings), (5,), threshold=Threshold(THRESHOLDS[name], 3))


@pytest.mark.parametrize("kv_dtype", ["int8", "kivi4"])
def test_key_channels_and_integers(kv_dtype):
    cell = {"family": "llama", "reducer": "quest", "selector": "linear"}
    check(cell, "three_left", METHODS["h2o"], (7, 13), key_channels=0.5, kv_dtype=kv_dtype)


@pytest.mark.parametrize("scope", ["context", "all"])
def test_key_channels_along_principal_axes(scope):
    """The same basis, but for numbers that fall on two sides of a half: mirrors are stored in fp16."""
    backbone = backbone_of({**CELL, "family": "llama", "reducer": "none", "selector": "linear"})
    batch = prompts(backbone.family, "three", True)
    compression = Compression(scope=scope, key_channels=0.5, key_axes="pca", key_window=4)
    plan, logits = opened(backbone, batch, compression)
    found, near = opened(backbone, batch, replace(compression, prefill_chunk=7))
    for ours, its in zip(found.layers, plan.layers, strict=True):
        assert torch.equal(ours.cut_keys.entries_BN, its.cut_keys.entries_BN)
        for name, part in vars(its.cut_keys.turn).items():
            assert torch.allclose(getattr(ours.cut_keys.turn, name).float(), part.float(), atol=2e-3), name
    assert (near - logits).abs().max() < 2e-3


@torch.no_grad()
@pytest.mark.parametrize(("family", "reducer", "selector"), [("llama", "quest", "linear"), ("llava", "none", "none")])
def test_what_exists_at_a_time(monkeypatch, family, reducer, selector):
    """Rows of a chunk in every wide part, masks of a block, and dense keys and values of one layer."""
    backbone = backbone_of({**CELL, "family": family, "reducer": reducer, "selector": selector})
    batch, layers = prompts(backbone.family, "three", pad_left=False), backbone.family.decoder.layers
    wide, masks, dense, packers = [], [], [], []
    attend, packer = functional.scaled_dot_product_attention, layer_packer.LayerPacker

    def attention_of(query, key, value, *mask, **options):
        masks.extend((query.shape[2], each.shape[-2]) for each in mask)  # the vision tower has none
        return attend(query, key, value, *mask, **options)

    def states_at(*_):
        dense.append(sum(states.keys is not None for states in packers[-1].dense.layers))

    monkeypatch.setattr(functional, "scaled_dot_product_attention", attention_of)
    monkeypatch.setattr(attention, "ROW_BLOCK", 3)
    monkeypatch.setattr(prefill, "LayerPacker", lambda *args: packers.append(packer(*args)) or packers[-1])
    handles = [each.mlp.register_forward_pre_hook(lambda _, args: wide.append(args[0].shape[1])) for each in layers]
    handles += [layer.register_forward_hook(states_at) for layer in layers]
    try:
        opened(backbone, batch, Compression(METHODS["knorm"], 0.4, prefill_chunk=7), steps=0)
    finally:
        for handle in handles:
            handle.remove()
    assert sum(wide) == batch.input_ids_BN.shape[1] * len(layers)
    assert (max(wide), max(masks), max(dense)) == (7, (3, 3), 1)


def test_a_question_in_chunks_is_never_evicted():
    """It is part of the prompt, however many tokens and chunks it has between two evictions."""
    backbone = backbone_of({**CELL, "family": "llama", "reducer": "none"})
    batch = prompts(backbone.family, "three", True)
    compression = Compression(build_eviction("streaming_llm"), 10, "tokens", every=4)
    _, logits = opened(backbone, batch, compression, "context_first", steps=9)
    _, near = opened(backbone, batch, replace(compression, prefill_chunk=4), "context_first", steps=9)
    assert (near - logits).abs().max() < 5e-5
