"""The second pass against a plain model that runs a prompt and its repetition as one sequence, in eager attention."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from subtoken_train.cache.cache import PackedCache
from subtoken_train.datasets.recall import RecallRecords, RecallTask, recall_accuracy
from subtoken_train.datasets.text_batches import collate_text
from subtoken_train.engine import second_pass as module
from subtoken_train.engine.attention import use_packed_attention
from subtoken_train.engine.second_pass import rows_of_task, second_pass
from subtoken_train.errors import SubTokenWarning
from subtoken_train.evictions import build_eviction
from subtoken_train.families.decoder import CACHE
from subtoken_train.inference import prefill
from subtoken_train.inference.batched import generate_batch
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.eviction_pass import EvictionPass
from subtoken_train.inference.pool import load_backbone
from subtoken_train.inference.prefill import open_prompts
from subtoken_train.types import Region
from tests.support.helpers import compress, only_sample
from tests.support.sampling import sampled
from tests.support.text_families import text_batch, text_family
from tests.support.truth_cells import backbone_of, difference
from tests.support.truth_models import prompts

CELL = {"selector": "none", "layout": "contiguous", "groups": "8/3", "budget": "per_token", "precision": "fp32"}
KVCOMPOSE = build_eviction("kvcompose")
KVZIP = build_eviction("kvzip", chunk=5)


def backbone_for(family, reducer="none", selector="none"):
    return backbone_of({**CELL, "family": family, "reducer": reducer, "selector": selector})


def scored(backbone, batch, method):
    """Scores of every layer after both passes, [B, h, N], and the eviction's pass."""
    family = backbone.family
    use_packed_attention(family.decoder.config)
    dense = DynamicCache(config=family.decoder.config)
    eviction = EvictionPass(Compression(method, 0.5), family, batch)
    result = backbone.run(batch, cache=dense, pad_left=True, observer=eviction.observe)
    before = [(layer.keys, layer.values) for layer in dense.layers]
    entries = [regions != Region.PADDING for _, regions in result.layer_rows()]
    for task in eviction.tasks:
        read = rows_of_task(family, result, task)
        second_pass(family, dense, entries, read, partial(eviction.observe_task, task, read))
    for layer, (keys, values) in zip(dense.layers, before, strict=True):
        assert layer.keys is keys
        assert layer.values is values
    return [eviction.scores[layer].scores_BhN for layer in range(len(before))], eviction


def release_scores(family, ids, value_norm=False):
    """The release, literally: the context, then the context again, whole matrices; [h, N] per layer."""
    config = LlamaConfig(**{**family.model.config.to_dict(), "attn_implementation": "eager"})
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(family.model.state_dict())
    length, kv_heads = len(ids), config.num_key_value_heads
    cache = DynamicCache(config=config)
    out = model(torch.tensor([[*ids, *ids]]), **{CACHE: cache}, output_attentions=True)
    scores = []
    for layer, attention in enumerate(out.attentions):
        task = attention[0, :, length:, :length]  # rows of the repetition, columns of the context
        head = task.amax(1).view(kv_heads, -1, length).mean(1)
        if value_norm:
            head = head * cache.layers[layer].values[0, :, :length].norm(dim=-1)
        scores.append(head + head.mean(0))
    return scores


@pytest.mark.parametrize("value_norm", [False, True])
@pytest.mark.parametrize("pad_left", [False, True])
@pytest.mark.parametrize("block", [7, 1024])
@torch.no_grad()
def test_scores_are_the_releases(monkeypatch, block, pad_left, value_norm):
    """GQA, a batch of unequal contexts padded on either side, rows in blocks that divide nothing."""
    monkeypatch.setattr(module, "BLOCK", block)
    backbone = backbone_for("llama")
    assert backbone.family.shape.num_kv_heads < backbone.family.decoder.config.num_attention_heads
    batch = text_batch([(30, 0, 0), (17, 0, 0), (24, 0, 0)], pad_left)
    scores, eviction = scored(backbone, batch, build_eviction("kvcompose", value_norm=value_norm))
    assert eviction.again_B.all()
    for i in range(3):
        real = batch.regions_BN[i] != Region.PADDING
        expected = release_scores(backbone.family, batch.input_ids_BN[i, real].tolist(), value_norm)
        for ours, theirs in zip(scores, expected, strict=True):
            assert torch.allclose(ours[i][:, real], theirs, atol=1e-5)


@torch.no_grad()
def test_a_question_is_the_task_where_there_is_one():
    """Only samples that end with their context are scored by the second pass, in one batch with others."""
    backbone = backbone_for("llama")
    batch = text_batch([(30, 0, 0), (20, 6, 0)])
    auto, eviction = scored(backbone, batch, KVCOMPOSE)
    assert eviction.again_B.tolist() == [True, False]
    aware, again = (scored(backbone, batch, build_eviction("kvcompose", task=x)) for x in ("aware", "agnostic"))
    assert (aware[1].again_B.tolist(), again[1].again_B.tolist()) == ([False] * 2, [True] * 2)
    for layer, scores in enumerate(auto):
        assert torch.equal(scores[0], again[0][layer][0])
        assert torch.equal(scores[1], aware[0][layer][1])
        assert not torch.allclose(aware[0][layer][:, :, :20], again[0][layer][:, :, :20])


@pytest.mark.parametrize(
    ("family", "reducer", "selector", "batch"),
    [
        ("llava_gqa", "none", "none", "text_left"),
        ("llava", "fastv_embeds", "linear", "three_right"),
        ("llava_gqa", "fastv_decoder", "gated", "three_left"),
        ("llava", "visionzip", "none", "text_right"),
        ("qwen2_5_vl", "none", "value_norm", "three_right"),
        ("qwen2_5_vl", "visionzip", "linear", "three_left"),
        ("qwen2", "none", "none", "text_left"),
        ("llama", "none", "mlp", "three_right"),
        # a prompt that ends with its image holds no question
        ("llava_gqa", "fastv_decoder", "none", "last_right"),
        ("qwen2_5_vl", "fastv_embeds", "mlp", "last_left"),
    ],
)
def test_what_follows_sees_the_kept_context_only(monkeypatch, family, reducer, selector, batch):
    """The packed cache against a recompute that knows what was kept: the second pass leaves nothing else behind."""
    passes = []
    monkeypatch.setattr(prefill, "second_pass", lambda *args: passes.append(second_pass(*args)))
    protocol = "query_aware" if batch.startswith("last") else "context_first"
    cell = {**CELL, "family": family, "reducer": reducer, "selector": selector, "batch": batch, "protocol": protocol}
    found = difference({**cell, "eviction": "kvcompose"}, steps=4)
    assert len(passes) == 1
    assert found.fits("fp32"), found


@sampled(
    ("family", "reducer"),
    [
        ("llama", "none"),
        ("llava_gqa", "fastv_decoder"),
        ("llava_gqa", "none"),
        ("qwen2_5_vl", "fastv_embeds"),
        ("qwen2_5_vl", "visionzip"),
    ],
    every=3,
)
@sampled("method", [KVCOMPOSE, KVZIP], every=4, ids=["kvcompose", "kvzip"])
@torch.no_grad()
def test_a_sample_keeps_what_it_keeps_alone(family, reducer, method):
    backbone = backbone_for(family, reducer)
    batch, compression = prompts(backbone.family, "three", pad_left=False), Compression(method, 0.4)

    def kept(batch):
        cache = PackedCache(backbone.family.shape.num_layers)
        first = open_prompts(backbone, batch, cache, compression, "context_first")
        padding = (first.regions_BM == Region.PADDING).sum(-1).tolist()  # on the left
        return [
            [
                [
                    (row - left, *of_heads)
                    for row, of_heads in zip(rows.tolist(), heads.tolist(), strict=True)
                    if row >= 0
                ]
                for left, rows, heads in zip(padding, layer.entries_BN, layer.heads_BNh, strict=True)
            ]
            for layer in first.plan.layers
        ]

    together = kept(batch)
    for i in range(3):
        alone = kept(only_sample(batch, i))
        for both, one in zip(together, alone, strict=True):
            assert both[i] == one[0]


def test_a_context_that_does_not_fit_twice_is_scored_with_a_warning():
    family = text_family(layers=2, max_position_embeddings=60)
    batch = text_batch([(31, 5, 0)])
    options = {"max_new_tokens": 2, "protocol": "context_first"}
    words = "'kvcompose' runs further rows .* past the 60 positions .*; shorten the context, or use the option task="
    with pytest.warns(SubTokenWarning, match=words):
        generate_batch(compress(family).eval(), batch, compression=Compression(KVCOMPOSE, 0.5), **options)
    causal = Compression(build_eviction("kvcompose", task="causal"), 0.5)
    assert generate_batch(compress(family).eval(), batch, compression=causal, **options)[0].token_ids
    shorter = text_batch([(29, 5, 0)])
    assert generate_batch(compress(family).eval(), shorter, compression=Compression(KVCOMPOSE, 0.5), **options)[
        0
    ].token_ids


def test_a_task_that_reads_the_question_is_refused_without_one():
    backbone = compress(text_family(layers=2)).eval()
    compression = Compression(build_eviction("kvcompose", task="aware"), 0.5)
    with pytest.raises(ValueError, match="'kvcompose' scores by the question; use query_aware"):
        generate_batch(
            backbone, text_batch([(31, 5, 0)]), max_new_tokens=1, compression=compression, protocol="context_first"
        )


@pytest.mark.slow
def test_it_recalls_what_the_causal_pass_loses():
    """Two contexts of eight facts each on the embedded language model, half of the cache kept."""
    backbone = load_backbone("checkpoints/tiny-llama")
    records = RecallRecords(RecallTask(backbone.family.tokenizer), "test", 2)
    asked = [replace(x.text, input_ids=x.text.input_ids[: x.text.prompt_length]) for x in (records[0], records[1])]
    found = {}
    for task in ("auto", "causal"):
        compression = Compression(build_eviction("kvcompose", task=task), 0.5)
        answers = generate_batch(
            backbone, collate_text(asked, 0), max_new_tokens=41, compression=compression, protocol="context_first"
        )
        found[task] = [recall_accuracy(x.text, records[i].codes) for i, x in enumerate(answers)]
    assert min(found["auto"]) > max(found["causal"]) + 0.4, found
