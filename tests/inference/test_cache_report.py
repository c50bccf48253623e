"""The bytes that are promised are there: all live tensors, before a prompt and after it is packed."""

from __future__ import annotations

import gc
import pickle

import pytest
import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from checkpoints.tiny_llava import build_processor
from subtoken_train.cache.cache import PackedCache
from subtoken_train.families.llava import LlavaFamily
from subtoken_train.inference.cache_report import report
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import decode, prefill
from subtoken_train.routing import RoutingConfig
from subtoken_train.types import Region
from tests.support.helpers import compress, make_batch
from tests.support.sampling import sampled
from tests.support.text_families import text_batch, text_family
from tests.support.truth_evictions import KV_HEADS, OwnSets

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


def llava():
    """Two images of 2,304 visual tokens: 2 layers, 4 key-value heads of width 16."""
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=1,
        image_size=96,
        patch_size=2,
        projection_dim=16,
    )
    text = LlamaConfig(
        vocab_size=90,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=8192,
    )
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=4, vision_feature_layer=-1)
    family = LlavaFamily(LlavaForConditionalGeneration(config).eval(), build_processor())
    return compress(family, ROUTING, name="fastv", keep_ratio=0.25, layer=1), make_batch([(2, 9)], visual=2304)


def llama():
    family = text_family(layers=2, num_key_value_heads=HEADS, max_position_embeddings=8192)
    return compress(family, ROUTING, name="quest", keep_ratio=0.25), text_batch([(4096, 30, 0)])


@sampled("kv_dtype", ["model", "int8", "int4", "int4_rotated", "int8_channel", "kivi4", "kivi2"], every=3)
@sampled("own_sets", [False, True], every=2)
@sampled("make", [llava, llama], every=2)
@torch.no_grad()
def test_live_tensors_grow_by_what_is_reported(make, own_sets, kv_dtype):
    backbone, batch = make()
    KV_HEADS[0], family = HEADS, backbone.family
    compression = Compression(OwnSets() if own_sets else None, kv_dtype=kv_dtype)
    caches = [PackedCache(family.shape.num_layers) for _ in range(2)]
    decode(backbone, torch.ones(1, 1, dtype=torch.long), _filled(backbone, batch, caches[0], compression)[0])
    caches.pop(0)
    before = live_bytes()
    cache, plan = _filled(backbone, batch, caches[0], compression)
    grown, told = live_bytes() - before, report(backbone, batch, pickle.loads(plan), cache)
    ledger = told.ledger
    assert told.slack_bytes == told.tail_bytes == 0
    assert grown == pytest.approx(told.total_bytes, rel=0.02)
    if kv_dtype == "model":
        assert grown == pytest.approx(ledger.bytes_of(), rel=0.02)
        assert told.payload_bytes == ledger.bytes_of(with_index=False)
    if not own_sets:
        assert told.realised_fraction == pytest.approx(0.15625, rel=0.02)

    decode(backbone, torch.ones(1, 1, dtype=torch.long), cache)
    grown, told = live_bytes() - before, report(backbone, batch, pickle.loads(plan), cache)
    assert told.tail_bytes == family.shape.token_bytes
    assert told.slack_bytes == 63 * family.shape.token_bytes
    assert grown == pytest.approx(told.total_bytes, rel=0.02)


def _filled(backbone, batch, cache, compression):
    return cache, pickle.dumps(prefill(backbone, batch, cache, compression).plan)


@pytest.mark.parametrize("routing", [None, ROUTING])
@pytest.mark.parametrize("kv_dtype", ["model", "int8"])
@torch.no_grad()
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
    words = str(told)
    promised = "" if routing is None else "; before the eviction nominal 62.5000%"
    assert f"({told.kept_entries:.1%} of its entries{promised})" in words
    assert ("%, in int8)" in words) == (kv_dtype == "int8")
    assert "nominal 100" not in words
    whole = report(backbone, batch, plan, cache)
    assert whole.kept_entries is None
    assert f"(nominal {whole.nominal_fraction:.4%})" in str(whole)
