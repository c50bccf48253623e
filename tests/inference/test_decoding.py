"""Greedy decoding from the compressed cache equals a full recompute without any cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from subtoken_train.cache.cache import PackedCache
from subtoken_train.inference.batched import generate_batch
from subtoken_train.inference.prefill import decode, open_prompts
from subtoken_train.routing import RoutingConfig
from subtoken_train.types import Batch, Region
from tests.support.generation_cells import generate_greedy
from tests.support.helpers import compress, make_batch, only_sample
from tests.support.sampling import sampled
from tests.support.tiny.qwen import qwen_batch, qwen_family, qwen_records
from tests.support.truth_cells import PLAIN_CELL, backbone_of, compression_of
from tests.support.truth_models import prompts as drawn_prompts

PROMPTS = [(1, 6), (2, 9), (0, 7)]


@torch.no_grad()
def test_finished_samples_are_padded_and_decoding_stops(tiny_family, monkeypatch):
    backbone = compress(tiny_family)
    calls = []

    def scripted(hidden):
        calls.append(hidden.shape[1])
        logits = torch.zeros(2, 1, 70)
        ends = [len(calls) == 2, len(calls) == 3]
        for sample, ended in enumerate(ends):
            logits[sample, 0, 2 if ended else 30] = 1
        return logits

    monkeypatch.setattr(tiny_family, "logits", scripted)
    got = generate_greedy(backbone, make_batch(PROMPTS[:2]), 10).token_ids_BT
    assert got.tolist() == [[30, 2, 0], [30, 30, 2]]


@torch.no_grad()
def test_routers_run_once_on_the_prompt(tiny_family):
    backbone = compress(tiny_family, RoutingConfig(num_groups=16, kept_groups=4), name="fastv", keep_ratio=0.25)
    calls = []
    for selector in backbone.bank.selectors:
        selector.register_forward_hook(lambda *_: calls.append(1))
    generate_greedy(backbone, make_batch(PROMPTS[:1]), 5)
    assert len(calls) == tiny_family.shape.num_layers


@pytest.fixture
def qwen():
    return qwen_family(seed=4)


def hf_answers(family, prompts: Batch, steps: int) -> torch.Tensor:
    generated = family.model.generate(
        input_ids=prompts.input_ids_BN,
        attention_mask=(prompts.regions_BN != Region.PADDING).long(),
        pixel_values=prompts.pixel_values,
        image_grid_thw=prompts.image_grid_I3,
        mm_token_type_ids=(prompts.input_ids_BN == family.image_token_id).int(),
        max_new_tokens=steps,
        do_sample=False,
    )
    return generated[:, prompts.input_ids_BN.shape[1] :]


@torch.no_grad()
def test_qwen_decodes_as_transformers_generates(qwen, tmp_path):
    """Images of different sizes, left-padded; one answer ends early at ``<|im_end|>``."""
    records = qwen_records(tmp_path)[:2]
    prompts = qwen_batch(qwen, records, pad_left=True, generation=True)
    assert (prompts.regions_BN == Region.PADDING).any()
    expected = hf_answers(qwen, prompts, 12)
    assert torch.equal(generate_greedy(compress(qwen), prompts, 12).token_ids_BT, expected)
    right = qwen_batch(qwen, records, generation=True)
    assert torch.equal(generate_greedy(compress(qwen), right, 12).token_ids_BT, expected)

    end, fourth = qwen.tokenizer.eos_token_id, int(expected[0, 3])
    rows = qwen.model.lm_head.weight
    rows[[end, fourth]] = rows[[fourth, end]]
    ended = hf_answers(qwen, prompts, 12)
    assert ended[0, 3:].tolist() == [end] + [qwen.tokenizer.pad_token_id] * 8
    assert torch.equal(generate_greedy(compress(qwen), prompts, 12).token_ids_BT, ended)


FORCED = {
    "routed": {"family": "llava_gqa", "reducer": "fastv_embeds", "selector": "linear"},
    "anchor": {"family": "llava_gqa", "reducer": "fastv_embeds"},
    "evicted": {"family": "llava_gqa", "eviction": "snapkv"},
    "rounded": {"reducer": "quest", "selector": "query", "eviction": "knorm", "precision": "int8"},
    "pages": {"eviction": "read_pages"},
    "before the question": {"family": "llava_gqa", "eviction": "knorm", "protocol": "context_first"},
}
REFERENCES = [[11, 45], [], [19, 23]]


@torch.no_grad()
def forced_by_hand(backbone, prompt, compression, protocol, tokens):
    """(log-probability, share that greedy decoding would say) of one prompt's tokens, fed one after another."""
    cache = PackedCache(backbone.family.shape.num_layers)
    logits_V = open_prompts(backbone, prompt, cache, compression, protocol).logits_BV[0]
    total, right = 0.0, 0
    for token in tokens:
        total += logits_V.float().log_softmax(-1)[token].item()
        right += int(logits_V.argmax()) == token
        logits_V = decode(backbone, torch.tensor([[token]]), cache)[0]
    return total, right / len(tokens)


@sampled("pad_left", [True, False], every=4)
@sampled("arm", FORCED, every=3)
def test_references_are_scored_as_decoding_steps_with_them_forced(arm, pad_left):
    """In a batch of unequal prompts and references; and the answers stay what they are."""
    cell = PLAIN_CELL | {"eviction": "none", "protocol": "query_aware"} | FORCED[arm]
    backbone, compression, protocol = backbone_of(cell), compression_of(cell), cell["protocol"]
    how = {"max_new_tokens": 5, "compression": compression, "protocol": protocol}
    batch = drawn_prompts(backbone.family, "three", pad_left)
    plain = generate_batch(backbone, batch, **how)
    said = plain[0].token_ids
    given = [[*said[:3], said[3] % 50 + 1, 12, 45], *REFERENCES[1:]]  # some right, some wrong
    got = generate_batch(backbone, batch, **how, references=given)
    assert [one.token_ids for one in got] == [one.token_ids for one in plain]
    assert [one.kv_bytes for one in got] == [one.kv_bytes for one in plain]
    assert got[1].reference is None
    assert 3 <= got[0].reference.right < 6
    for i in (0, 2):
        score, alone = got[i].reference, only_sample(batch, i)
        logprob, share = forced_by_hand(backbone, alone, compression, protocol, given[i])
        assert score.logprob == pytest.approx(logprob, abs=1e-4)
        assert (score.right / score.count, score.count) == (share, len(given[i]))


def test_references_that_cannot_be_scored_are_refused():
    cell = PLAIN_CELL | {"eviction": "h2o"}
    backbone = backbone_of(cell)
    batch = drawn_prompts(backbone.family, "three", True)
    named = {"max_new_tokens": 2, "references": REFERENCES}
    with pytest.raises(ValueError, match="references cannot be scored with eviction_every=3; leave one out"):
        generate_batch(backbone, batch, compression=replace(compression_of(cell), every=3), **named)
    with pytest.raises(ValueError, match="2 lists of continuations for 3 prompts"):
        generate_batch(backbone, batch, max_new_tokens=2, references=REFERENCES[:2])
