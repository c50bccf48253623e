"""Every argument of transformers' ``generate`` is served as there, or refused in words; none is ignored."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList

from checkpoints.tiny_llama import build_tokenizer
from subtoken_train.families.decoder import CACHE
from subtoken_train.inference.generation import REFUSED, settings_used
from tests.support.generation_cells import PLAIN, SERVED_CALLS, inputs_of, model_of

VALUES = {"use_cache": False, "penalty_alpha": 0.6, "guidance_scale": 2.0, "cache_implementation": "static"}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_answer_is_refused_wherever_it_stands(name):
    value, own = VALUES.get(name, True if REFUSED[name] == (False,) else 3), GenerationConfig()
    with pytest.raises(ValueError, match=f"{name}.* does not go with a compressed cache.*; leave it out") as caught:
        settings_used({name: value}, own)
    assert len(str(caught.value)) < 220
    given = GenerationConfig()
    setattr(given, name, value)
    with pytest.raises(ValueError, match=f"{name}.* does not go"):
        settings_used({"generation_config": given}, own)
    setattr(own, name, value)
    with pytest.raises(ValueError, match=rf"model\.generation_config\.{name}.* does not go"):
        settings_used({}, own)
    for neutral in REFUSED[name]:  # a call overrides its model
        assert settings_used({name: neutral}, own)[name] == neutral


def test_copies_of_the_own_configuration_pass():
    own = GenerationConfig(**{**GenerationConfig._get_default_generation_params(), "num_assistant_tokens": 7})
    own.chat_format = "chatml"
    settings_used({"generation_config": GenerationConfig(**own.to_dict())}, own)
    settings_used(dict.fromkeys(("position_ids", "assistant_model", "maxnewtokens")), own)
    with pytest.raises(ValueError, match="use_cache=None does not go"):
        settings_used({"use_cache": None}, own)


@pytest.mark.parametrize(
    "name", ["max_newtokens", "cu_seq_lens_q", "use_model_defaults", "is_causal", "logits_to_keep"]
)
def test_unknown_names_are_refused_and_the_nearest_is_named(name):
    hint = " Did you mean 'max_new_tokens'?" if name == "max_newtokens" else ""
    for given in ({name: 3}, {"generation_config": GenerationConfig(**{name: 3})}):
        with pytest.raises(ValueError, match=rf"unknown argument of generate '{name}'\.{hint}"):
            settings_used(given, GenerationConfig())
    with pytest.raises(ValueError, match="must be a transformers GenerationConfig, not dict"):
        settings_used({"generation_config": {name: 3}}, GenerationConfig())


def test_settings_have_the_precedence_of_transformers():
    own, given = GenerationConfig(num_beams=2, pad_token_id=1), GenerationConfig(num_beams=3)
    settings = {"generation_config": given}
    assert settings_used({}, own)["num_beams"] == 2
    assert settings_used(settings, own)["num_beams"] == 3
    assert settings_used(settings | {"num_beams": 4}, own)["num_beams"] == 4
    assert settings_used(settings, own)["pad_token_id"] == 1
    assert settings_used(settings | {"pad_token_id": None}, own)["pad_token_id"] is None


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
        model.generate(**inputs, max_new_tokens=3, **{name: 3})
    assert model.last is last
    assert torch.equal(model.generate(**inputs, max_new_tokens=3), first)


@pytest.mark.parametrize("name", ["max_new_tokens", "min_length", "num_beams"])
@pytest.mark.parametrize("value", [1.5, "3", float("nan")])
def test_counts_are_whole_numbers(name, value):
    with pytest.raises(ValueError, match=rf"^{name}=.* must be a whole number$"):
        settings_used({name: value}, GenerationConfig())
