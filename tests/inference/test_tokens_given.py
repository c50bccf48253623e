"""Prompts, masks and further turns as ``generate`` takes them: read as transformers reads them, or refused in words."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import GenerationConfig

from subtoken_train.inference.generation import GenerateCall, check_ids, settings_used
from tests.support.generation_cells import PLAIN, inputs_of, model_of, settings_of
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


def test_padding_that_ends_texts_is_not_inferred_and_transformers_says_so(caplog):
    model = model_of(family="llama", **PLAIN)
    inputs = inputs_of(model)
    ids = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, 2)
    with caplog.at_level(logging.WARNING):
        expected = model.backbone.model.generate(input_ids=ids, pad_token_id=2, **GREEDY)
        logger = logging.getLogger("transformers")
        logger.propagate = True
        got = model.generate(input_ids=ids, pad_token_id=2, **GREEDY)
    assert torch.equal(got, expected)
    assert bool((model.last.batch.regions_BN != 0).all())


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
WRONG_IDS = {
    "none": (None, "generate needs input_ids with at least one token"),
    "empty": (torch.zeros(1, 0, dtype=torch.long), "generate needs input_ids with at least one token"),
    "list": ([[1, 2]], "generate needs input_ids"),
    "flat": (IDS[0], r"must be whole numbers \[batch, tokens\], int64 or int32, not \[4\] of int64"),
    "float": (IDS.float(), r"not \[2, 4\] of float32"),
    "bool": (IDS.bool(), r"not \[2, 4\] of bool"),
    "large": (IDS * 9, "input_ids hold 99, but the model's tokens are 0 to 89; use its own tokenizer"),
    "negative": (-IDS, "input_ids hold -11, but"),
}


@pytest.mark.parametrize("name", WRONG_IDS)
def test_wrong_ids_are_worded(name):
    ids, words = WRONG_IDS[name]
    with pytest.raises(ValueError, match=words):
        check_ids(ids, 90)
    assert check_ids(IDS.int(), 90).dtype == torch.int32


WRONG_MASKS = {
    "flat": (torch.ones(4), r"attention_mask must be \[2, 4\] as input_ids are, not \[4\] of float32"),
    "short": (torch.ones(2, 3).long(), r"must be \[2, 4\] .* not \[2, 3\] of int64"),
    "rows": (torch.ones(1, 4).long(), r"must be \[2, 4\] .* not \[1, 4\]"),
    "deep": (torch.ones(2, 1, 4, 4), r"must be \[2, 4\] .* not \[2, 1, 4, 4\]"),
    "list": ([[1, 1, 1, 1]] * 2, "must be .* not list"),
    "values": (torch.full((2, 4), 2), "holds other values than 0 .padding. and 1 .tokens."),
    "additive": (torch.full((2, 4), -torch.inf), "holds other values than 0"),
    "nothing": (torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]]), "prompt 1 is all padding; every row"),
}


@pytest.mark.parametrize("name", WRONG_MASKS)
def test_wrong_masks_are_worded(name):
    mask, words = WRONG_MASKS[name]
    with pytest.raises(ValueError, match=words):
        _ = GenerateCall(IDS, mask, {}).visible


def test_a_prompt_of_padding_is_worded():
    with pytest.raises(ValueError, match="prompt 0 is all padding"):
        _ = GenerateCall(IDS, None, {"pad_token_id": 11}).visible


def turn_of(model, inputs, count=3):
    first = model.generate(**inputs, **settings_of(model), max_new_tokens=3, do_sample=False)
    ids = torch.cat([first, torch.full((len(first), count), 11)], 1)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, ids.shape[1] - inputs["input_ids"].shape[1]), value=1)
    return ids, mask


WRONG_TURNS = {
    "beams": (lambda i, m: {"num_beams": 2}, "num_beams and num_return_sequences make copies of prompts"),
    "sequences": (lambda i, m: {"num_return_sequences": 2, "do_sample": True}, "make copies of prompts"),
    "no beams": (lambda i, m: {"num_beams": 0}, r"must be whole numbers of at least 1, not \[0, 1\]"),
    "rows": (lambda i, m: {"input_ids": i[:2], "attention_mask": m[:2]}, "holds 3 rows and input_ids 2; give as many"),
    "mask rows": (lambda i, m: {"attention_mask": m[:2]}, r"attention_mask must be \[3, \d+\] as input_ids are"),
    "nothing new": (lambda i, m: {"input_ids": i[:, :-5], "attention_mask": m[:, :-5]}, "has seen .* at least one new"),
    "other prompt": (lambda i, m: {"input_ids": i.flip(0)}, "do not begin with the prompt that past_key_values holds"),
    "new alone": (lambda i, m: {"input_ids": i[:, -4:], "attention_mask": None}, "has seen .* input_ids end after 4"),
    "an image": (lambda i, m: {"input_ids": i.index_fill(1, torch.tensor([-2]), 4)}, "hold an image"),
    "flat": (lambda i, m: {"input_ids": i[0]}, "must be whole numbers"),
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


def test_new_tokens_alone_need_the_mask_of_all():
    model = model_of()
    ids, mask = turn_of(model, inputs_of(model))
    expected = model.generate(input_ids=ids, attention_mask=mask, past_key_values=model.last.cache, **GREEDY)
    turn_of(model, inputs_of(model))
    seen = model.last.cache.get_seq_length()
    got = model.generate(input_ids=ids[:, seen:], attention_mask=mask, cache=model.last.cache, **GREEDY)  # its new name
    assert torch.equal(got[:, ids.shape[1] - seen :], expected[:, ids.shape[1] :])


def test_beams_leave_no_cache_to_go_on_with():
    model = model_of()
    out = model.generate(**inputs_of(model, "one"), max_new_tokens=3, num_beams=2, num_return_sequences=2)
    with pytest.raises(ValueError, match="was left by a beam search"):
        model.generate(input_ids=out, past_key_values=model.last.cache, **GREEDY)


def test_chosen_rows_of_a_cache_go_on():
    model = model_of()
    ids, mask = turn_of(model, inputs_of(model))
    expected = model.generate(input_ids=ids, attention_mask=mask, past_key_values=model.last.cache, **GREEDY)
    turn_of(model, inputs_of(model))
    model.last.cache.batch_select_indices(torch.tensor([2, 0]))
    chosen = {"input_ids": ids[[2, 0]], "attention_mask": mask[[2, 0]]}
    got = model.generate(**chosen, past_key_values=model.last.cache, **GREEDY)
    assert torch.equal(got, expected[[2, 0]])
