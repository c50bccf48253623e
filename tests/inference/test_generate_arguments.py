"""Every argument of transformers' ``generate`` is served as there, or refused in words; none is ignored."""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers import (
    CompileConfig,
    GenerationConfig,
    GenerationMixin,
    LlamaForCausalLM,
    LlavaForConditionalGeneration,
    LogitsProcessorList,
    Qwen2_5_VLForConditionalGeneration,
)

from checkpoints.tiny_llama import build_tokenizer
from subtoken_train.families.decoder import CACHE
from subtoken_train.inference.generate_arguments import (
    INPUTS,
    REFUSED,
    REFUSED_IF_GIVEN,
    SERVED,
    check_settings,
    setting,
)
from tests.support.generation_cells import PLAIN, SERVED_CALLS, inputs_of, model_of

ONE = torch.ones(1, 1)
VALUES = {
    "use_cache": False,
    "output_attentions": True,
    "output_hidden_states": True,
    "cache_implementation": "static",
    "token_healing": True,
    "guidance_scale": 2.0,
    "use_mtp": True,
    "is_assistant": True,
    "penalty_alpha": 0.6,
    "num_beam_groups": 2,
    "diversity_penalty": 0.5,
    "low_memory": True,
    "trust_remote_code": True,
    "synced_gpus": True,
    "compile_config": CompileConfig(),
    "assistant_confidence_threshold": 0.1,
    "num_assistant_tokens_schedule": "heuristic",
    "custom_generate": "somebody/code",
    "speculation_type": "dflash",
    "cache_config": {"backend": "quanto"},
}
TENSORS = {"negative_prompt_ids", "position_ids", "inputs_embeds", "pixel_values_videos", "token_type_ids", "inputs"}


def value_of(name: str):
    return ONE if name in TENSORS else VALUES.get(name, 3)


def test_every_argument_of_transformers_is_served_or_refused():
    names = {name for name in vars(GenerationConfig()) if name[0] != "_"} - {"transformers_version"}
    names |= set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs"}
    names |= {"trust_remote_code", "tokenizer", "assistant_tokenizer"}  # which it takes out of its kwargs
    for model in (LlavaForConditionalGeneration, Qwen2_5_VLForConditionalGeneration, LlamaForCausalLM):
        names |= set(inspect.signature(model.forward).parameters) - {"self", "kwargs", CACHE}
    known = INPUTS | SERVED | set(REFUSED) | set(REFUSED_IF_GIVEN)
    assert names - known == set()
    assert not (INPUTS | SERVED) & (set(REFUSED) | set(REFUSED_IF_GIVEN))


@pytest.mark.parametrize("name", sorted({**REFUSED, **REFUSED_IF_GIVEN}))
def test_what_has_no_answer_is_refused_wherever_it_stands(name):
    value, own = value_of(name), GenerationConfig()
    with pytest.raises(ValueError, match=f"{name}.* does not go with a compressed cache: .*; leave it out") as caught:
        check_settings({name: value}, own)
    assert len(str(caught.value)) < 200
    if hasattr(own, name):
        given = GenerationConfig()
        setattr(given, name, value)
        with pytest.raises(ValueError, match=f"{name}.* does not go"):
            check_settings({"generation_config": given}, own)
    if name in REFUSED:
        setattr(own, name, value)
        with pytest.raises(ValueError, match=rf"model\.generation_config\.{name}.* does not go"):
            check_settings({}, own)
        if REFUSED[name][0]:
            check_settings({name: REFUSED[name][0][0]}, own)  # a call overrides its model


def test_neutral_values_and_copies_of_the_own_configuration_pass():
    own = GenerationConfig(**{**GenerationConfig._get_default_generation_params(), "num_assistant_tokens": 7})
    own.chat_format = "chatml"
    check_settings({"generation_config": GenerationConfig(**own.to_dict())}, own)
    check_settings(dict.fromkeys(("position_ids", "assistant_model", "maxnewtokens")), own)
    for name, (neutral, _) in {**REFUSED, **REFUSED_IF_GIVEN}.items():
        for value in neutral:
            check_settings({name: value}, own)
    with pytest.raises(ValueError, match="use_cache=None does not go"):
        check_settings({"use_cache": None}, own)


@pytest.mark.parametrize("name", ["max_newtokens", "cu_seq_lens_q", "use_model_defaults", "is_causal"])
def test_unknown_names_are_refused_and_the_nearest_is_named(name):
    hint = " Did you mean 'max_new_tokens'?" if name == "max_newtokens" else ""
    with pytest.raises(ValueError, match=rf"generate has no argument '{name}'.{hint}"):
        check_settings({name: 3}, GenerationConfig())
    with pytest.raises(ValueError, match=rf"generate has no argument '{name}'"):
        check_settings({"generation_config": GenerationConfig(**{name: 3})}, GenerationConfig())
    with pytest.raises(ValueError, match="must be a transformers GenerationConfig, not dict"):
        check_settings({"generation_config": {name: 3}}, GenerationConfig())


def test_settings_have_the_precedence_of_transformers():
    own, given = GenerationConfig(num_beams=2, pad_token_id=1), GenerationConfig(num_beams=3)
    settings = {"generation_config": given}
    assert setting("num_beams", {}, own) == 2
    assert setting("num_beams", settings, own) == 3
    assert setting("num_beams", settings | {"num_beams": 4}, own) == 4
    assert setting("pad_token_id", settings, own) == 1
    assert setting("pad_token_id", settings | {"pad_token_id": None}, own) is None


@pytest.mark.parametrize("name", SERVED_CALLS)
def test_what_is_served_does_what_it_does_in_transformers(name):
    model = model_of(**PLAIN)
    settings = {"max_new_tokens": 5, **SERVED_CALLS[name]}
    if name == "stops":
        settings["tokenizer"] = build_tokenizer()  # whose vocabulary holds these ids
    if name == "config":
        del settings["max_new_tokens"]
    results = []
    for generate in (model.backbone.model.generate, model.generate):
        torch.manual_seed(5)
        results.append(generate(**inputs_of(model), **settings))
    expected, got = results
    if name == "scores":
        for kind in ("scores", "logits"):
            for ours, theirs in zip(got[kind], expected[kind], strict=True):
                assert (ours - theirs).abs().max() < 1e-4
        assert got[CACHE] is model.last.cache
        expected, got = expected.sequences, got.sequences
    assert torch.equal(got, expected)


def test_a_processor_that_runs_the_model_is_refused():
    model = model_of(**PLAIN)

    def nosy(ids, scores):
        return scores + model.backbone.model(input_ids=ids).logits[:, -1]

    with pytest.raises(ValueError, match="called with another cache while it generated"):
        model.generate(**inputs_of(model), max_new_tokens=2, logits_processor=LogitsProcessorList([nosy]))


@pytest.mark.parametrize("name", ["guidance_scale", "position_ids", "prompt_lookup_num_tokens", "prefill_chunk_size"])
def test_a_refused_call_leaves_the_object_as_it_was(name):
    model = model_of()
    inputs = inputs_of(model, "one")
    first = model.generate(**inputs, max_new_tokens=3)
    last = model.last
    with pytest.raises(ValueError, match=f"{name}.* does not go"):
        model.generate(**inputs, max_new_tokens=3, **{name: value_of(name)})
    assert model.last is last
    assert torch.equal(model.generate(**inputs, max_new_tokens=3), first)


@pytest.mark.parametrize("name", ["max_new_tokens", "min_length", "num_beams"])
@pytest.mark.parametrize("value", [1.5, "3", float("nan")])
def test_counts_are_whole_numbers(name, value):
    with pytest.raises(ValueError, match=rf"^{name}=.* must be a whole number$"):
        check_settings({name: value}, GenerationConfig())
