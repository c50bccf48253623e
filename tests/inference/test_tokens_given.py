"""Prompts, masks, turns and settings as ``generate`` takes them: read as transformers does, or refused in words."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList

from checkpoints.tiny_llama import build_tokenizer
from subtoken_train.families.decoder import CACHE
from subtoken_train.inference.generation import REFUSED, GenerateCall, check_ids, settings_used
from tests.support.generation_cells import PLAIN, SERVED_CALLS, inputs_of, model_of, settings_of
from tests.support.sampling import sampled

FAMILIES = ["llava_gqa", "qwen2_5_vl", "llama"]
GREEDY = {"max_new_tokens": 5, "do_sample": False}


@pytest.mark.parametrize("pad_left", [True, False])
@pytest.mark.parametrize("levels", [PLAIN, {}], ids=["plain", "compressed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_without_a_mask_is_read_as_with_its_mask(family, levels, pad_left):
    model = model_of(family=family, **levels)
    inputs, settings = inputs_of(model, pad_left=pad_left), settings_of(model)
    expected = model.generate(**inputs, **settings, **GREEDY)
    mask = inputs.pop("attention_mask")
    assert not mask.all()
    assert torch.equal(model.generate(**inputs, **settings, **GREEDY), expected)
    assert torch.equal(model.last.batch.regions_BN != 0, mask.bool())
    if pad_left and levels is PLAIN:
        plain = model.backbone.model.generate(**inputs, pad_token_id=settings["pad_token_id"], **GREEDY)
        assert torch.equal(plain, expected)


SPECIAL = [
    {"pad_token_id": 0, "eos_token_id": 2},
    {"pad_token_id": 0, "eos_token_id": [2, 3]},
    {"pad_token_id": 0, "eos_token_id": [2, 0]},
    {"pad_token_id": 2, "eos_token_id": 2},
    {"pad_token_id": None, "eos_token_id": 0},
    {"pad_token_id": None, "eos_token_id": [0, 2]},
    {"pad_token_id": 0, "eos_token_id": None},
    {"pad_token_id": None, "eos_token_id": None},
    {"pad_token_id": 55, "eos_token_id": 2},
    {"pad_token_id": torch.tensor(0), "eos_token_id": torch.tensor([2])},
]


@pytest.mark.parametrize("special", SPECIAL, ids=str)
def test_the_mask_is_inferred_as_transformers_infers_it(special):
    model = model_of(family="llama", **PLAIN).backbone.model
    ids = torch.tensor([[0, 0, 7, 0, 9], [0, 5, 2, 8, 9], [4, 5, 6, 7, 0]])
    config = GenerationConfig(**special)
    model._prepare_special_tokens(config, kwargs_has_attention_mask=True, device=torch.device("cpu"))
    expected = model._prepare_attention_mask_for_generation(ids, config, {})
    for settings in ({"generation_config": config}, special):
        used = settings_used(settings, GenerationConfig())
        assert torch.equal(GenerateCall(ids, None, used).visible, expected.bool())


@pytest.mark.parametrize("family", FAMILIES)
def test_holes_in_a_mask_are_read_as_transformers_reads_them(family):
    model = model_of(family=family, **PLAIN)
    inputs = inputs_of(model)
    inputs["attention_mask"][:, -3] = 0
    inputs["attention_mask"][0, -5] = 0
    settings = settings_of(model)
    expected = model.backbone.model.generate(**inputs, pad_token_id=settings["pad_token_id"], **GREEDY)
    for kind in (torch.long, torch.bool, torch.float32):
        inputs["attention_mask"] = inputs["attention_mask"].to(kind)
        assert torch.equal(model.generate(**inputs, **settings, **GREEDY), expected)


IDS = torch.full((2, 4), 11)


ROWS = r"attention_mask must be \[2, 4\] as input_ids are, not {}"
WRONG_INPUTS = {
    "none": (lambda: check_ids(None, 90), "generate needs input_ids with at least one token"),
    "empty": (lambda: check_ids(IDS[:, :0], 90), "generate needs input_ids with at least one token"),
    "flat": (lambda: check_ids(IDS[0], 90), r"whole numbers \[batch, tokens\], int64 or int32, not \[4\] of int64"),
    "float": (lambda: check_ids(IDS.float(), 90), r"not \[2, 4\] of float32"),
    "large": (lambda: check_ids(IDS * 9, 90), "input_ids hold 99, but the model's tokens are 0 to 89; use its own"),
    "negative": (lambda: check_ids(-IDS, 90), "input_ids hold -11, but"),
    "short mask": (lambda: visible(torch.ones(2, 3).long()), ROWS.format(r"\[2, 3\] of int64")),
    "deep mask": (lambda: visible(torch.ones(2, 1, 4, 4)), ROWS.format(r"\[2, 1, 4, 4\]")),
    "list mask": (lambda: visible([[1, 1, 1, 1]] * 2), ROWS.format("list")),
    "additive mask": (lambda: visible(torch.full((2, 4), -torch.inf)), "holds other values than 0 .padding. and 1"),
    "nothing": (lambda: visible(torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])), "prompt 1 is all padding; every row"),
    "padding": (lambda: visible(None, pad_token_id=11), "prompt 0 is all padding"),
}


def visible(mask, **settings):
    return GenerateCall(IDS, mask, settings).visible


@pytest.mark.parametrize("name", WRONG_INPUTS)
def test_wrong_ids_and_masks_are_worded(name):
    call, words = WRONG_INPUTS[name]
    with pytest.raises(ValueError, match=words):
        call()
    assert check_ids(IDS.int(), 90).dtype == torch.int32


def turn_of(model, inputs, count=3):
    first = model.generate(**inputs, **settings_of(model), max_new_tokens=3, do_sample=False)
    ids = torch.cat([first, torch.full((len(first), count), 11)], 1)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, ids.shape[1] - inputs["input_ids"].shape[1]), value=1)
    return ids, mask


WRONG_TURNS = {
    "beams": (lambda i, m: {"num_beams": 2}, "num_beams and num_return_sequences make copies of prompts"),
    "no beams": (lambda i, m: {"num_beams": 0}, "num_beams is 0; it must be 1 or more"),
    "rows": (lambda i, m: {"input_ids": i[:2], "attention_mask": m[:2]}, "holds 3 rows and input_ids 2; give as many"),
    "mask rows": (lambda i, m: {"attention_mask": m[:2]}, r"attention_mask must be \[3, \d+\] as input_ids are"),
    "nothing new": (lambda i, m: {"input_ids": i[:, :-5], "attention_mask": m[:, :-5]}, "has seen .* at least one new"),
    "other prompt": (lambda i, m: {"input_ids": i.flip(0)}, "do not begin with the prompt that past_key_values holds"),
    "new alone": (lambda i, m: {"input_ids": i[:, -4:], "attention_mask": None}, "has seen .* input_ids end after 4"),
    "an image": (lambda i, m: {"input_ids": i.index_fill(1, torch.tensor([-2]), 4)}, "hold an image"),
}


@sampled("name", WRONG_TURNS, every=2)
def test_wrong_further_turns_are_worded_and_leave_the_cache(name):
    model = model_of()
    ids, mask = turn_of(model, inputs_of(model))
    change, words = WRONG_TURNS[name]
    good = {"input_ids": ids, "attention_mask": mask, "past_key_values": model.last.cache, **GREEDY}
    length = model.last.cache.get_seq_length()
    with pytest.raises(ValueError, match=words):
        model.generate(**(good | change(ids, mask)))
    assert model.last.cache.get_seq_length() == length
    assert model.generate(**good).shape[1] == ids.shape[1] + 5


def test_new_tokens_alone_need_the_mask_of_all_and_chosen_rows_go_on():
    model = model_of()
    ids, mask = turn_of(model, inputs_of(model))
    expected = model.generate(input_ids=ids, attention_mask=mask, past_key_values=model.last.cache, **GREEDY)
    turn_of(model, inputs_of(model))
    seen = model.last.cache.get_seq_length()
    got = model.generate(input_ids=ids[:, seen:], attention_mask=mask, cache=model.last.cache, **GREEDY)  # its new name
    assert torch.equal(got[:, ids.shape[1] - seen :], expected[:, ids.shape[1] :])
    turn_of(model, inputs_of(model))
    model.last.cache.batch_select_indices(torch.tensor([2, 0]))
    chosen = {"input_ids": ids[[2, 0]], "attention_mask": mask[[2, 0]]}
    assert torch.equal(model.generate(**chosen, past_key_values=model.last.cache, **GREEDY), expected[[2, 0]])


def test_beams_leave_no_cache_to_go_on_with():
    model = model_of()
    out = model.generate(**inputs_of(model, "one"), max_new_tokens=3, num_beams=2, num_return_sequences=2)
    with pytest.raises(ValueError, match="was left by a beam search"):
        model.generate(input_ids=out, past_key_values=model.last.cache, **GREEDY)


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


@pytest.mark.parametrize("name", ["max_newtokens", "use_model_defaults", "logits_to_keep"])
def test_unknown_names_are_refused_and_the_nearest_is_named(name):
    hint = " Did you mean 'max_new_tokens'?" if name == "max_newtokens" else ""
    for given in ({name: 3}, {"generation_config": GenerationConfig(**{name: 3})}):
        with pytest.raises(ValueError, match=rf"unknown argument of generate '{name}'\.{hint}"):
            settings_used(given, GenerationConfig())
    with pytest.raises(ValueError, match="must be a transformers GenerationConfig, not dict"):
        settings_used({"generation_config": {name: 3}}, GenerationConfig())
    with pytest.raises(ValueError, match=r"^num_beams=1\.5 must be a whole number$"):
        settings_used({"num_beams": 1.5}, GenerationConfig())


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
