"""Sides of a benchmark: transformers' caches give the backbone's logits, packed ones their own report's bytes."""

from __future__ import annotations

import pytest
import torch

from subtoken_train.benchmarking.sides import PackedSide, dense_sides
from subtoken_train.benchmarking.synthetic_prompts import PromptParts, draw_prompts, prompt_parts
from subtoken_train.cache.cache import PackedCache
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.families.decoder import PREFIX
from subtoken_train.inference.cache_report import report
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import prefill
from subtoken_train.reducers import build_reducer
from subtoken_train.routing import RoutingConfig
from subtoken_train.routing.bank import RouterBank
from tests.support.sampling import sampled
from tests.support.text_families import text_family
from tests.support.tiny.glm4v import glm_family
from tests.support.tiny.idefics3 import idefics_family
from tests.support.tiny.internvl import internvl_family
from tests.support.tiny.llava_next import next_family
from tests.support.tiny.llava_onevision import onevision_family
from tests.support.tiny.mistral3 import mistral3_family
from tests.support.tiny.qwen import qwen2_family, qwen3_family, qwen_family

STEPS = 3
WHOLE = build_reducer("none")
TEXT = PromptParts(0, 0, 0, 4, 13)


def forced(side) -> torch.Tensor:
    """Logits of the prompt and of forced tokens, [B, STEPS + 1, V]."""
    with side.turn():
        logits = [side.prefill()]
        for _ in range(STEPS):
            logits.append(side.step(logits[-1].argmax(-1)[:, None]))
    return torch.stack(logits, dim=1)


def checked(family, parts) -> None:
    prompts = draw_prompts(family, parts, 2)
    packed = forced(PackedSide("packed", "", family, prompts, WHOLE, None, Compression()))
    assert packed.isfinite().all()
    for side in dense_sides(family, prompts, STEPS):
        assert torch.allclose(forced(side), packed, atol=2e-5), side.name


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral"])
def test_transformers_caches_give_the_logits_of_the_packed_one_of_texts(kind):
    checked(text_family(kind), TEXT)


SEEING = [
    qwen_family,
    qwen2_family,
    qwen3_family,
    next_family,
    onevision_family,
    internvl_family,
    idefics_family,
    mistral3_family,
    glm_family,
]


@sampled("make", SEEING, every=3)
def test_they_do_of_one_picture_and_of_two(make):
    family = make()
    checked(family, prompt_parts(family))
    one, several = (family.visual_tokens((336, 336), together=count) for count in (1, 2))
    parts = prompt_parts(family, max(prompt_parts(family).length - one + 2 * several + 1, prompt_parts(family).length))
    assert parts.images > 1
    checked(family, parts)


def test_they_do_of_a_llavas(tiny_family):
    checked(tiny_family, prompt_parts(tiny_family))


@pytest.mark.slow
def test_compiled_steps_give_the_same_and_keep_their_cache(monkeypatch):
    """Traced without a GPU's compiler; the graphs themselves are a GPU's to show."""
    family = text_family("llama")
    prompts, compiled = draw_prompts(family, TEXT, 2), []

    def trace(model, mode):
        compiled.append(mode)
        return original(model, backend="eager")

    original = torch.compile
    plain = dense_sides(family, prompts, STEPS)[1]
    expected = forced(plain)
    monkeypatch.setattr(torch, "compile", trace)
    side = type(plain)("static", "", family, prompts, plain._make_cache, compiles=True)
    assert compiled == ["reduce-overhead"]
    assert torch.allclose(forced(side), expected, atol=2e-5)
    cache = side.cache
    assert torch.allclose(forced(side), expected, atol=2e-5)
    assert side.cache is cache
    assert plain.cache is None
    side.close()
    assert side.cache is None


def test_attention_is_transformers_own_in_a_dense_turn_and_ours_after_it():
    family = text_family("llama")
    prompts = draw_prompts(family, TEXT, 1)
    config = family.decoder.config
    forced(PackedSide("packed", "", family, prompts, WHOLE, None, Compression()))
    assert config._attn_implementation == PREFIX + "sdpa"
    with dense_sides(family, prompts, 1)[0].turn():
        assert config._attn_implementation == "sdpa"
    assert config._attn_implementation == PREFIX + "sdpa"


@sampled("kv_dtype", ["model", "int8"], every=2)
def test_a_packed_side_holds_what_its_cache_reports(tiny_family, kv_dtype):
    prompts = draw_prompts(tiny_family, prompt_parts(tiny_family), 2)
    reducer, bank = (
        build_reducer("fastv", 0.25),
        RouterBank(RoutingConfig(), tiny_family.hidden_size, tiny_family.shape),
    )
    side = PackedSide("routed", "", tiny_family, prompts, reducer, bank.eval(), Compression(kv_dtype=kv_dtype))
    with side.turn():
        side.step(side.prefill().argmax(-1)[:, None])
        held, entries = side.held(), side.entries()
    assert not any(layer.self_attn.v_proj._forward_hooks for layer in tiny_family.decoder.layers)
    assert entries == 16 + 19
    backbone, cache = CompressedBackbone(tiny_family, reducer, bank).eval(), PackedCache(tiny_family.shape.num_layers)
    opened = prefill(backbone, prompts, cache, Compression(kv_dtype=kv_dtype))
    told = report(backbone, prompts, opened.plan, cache)
    assert (held.payload, held.index) == (told.payload_bytes, told.index_bytes)
    assert held.tail == 2 * tiny_family.shape.token_bytes
    assert held.total == held.payload + held.index + held.tail + held.slack


def test_a_packed_side_holds_the_tables_of_its_kernels(monkeypatch):
    family = text_family("llama")
    prompts = draw_prompts(family, TEXT, 1)
    side = PackedSide("packed", "", family, prompts, WHOLE, None, Compression())
    with side.turn():
        side.prefill()
        without = side.held().total
        monkeypatch.setattr(PackedCache, "kernel_bytes", 123)
        assert side.held().total == without + 123
