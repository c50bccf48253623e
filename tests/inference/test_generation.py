"""``generate`` of transformers on packed caches: loop, beams, turns, streamers; what it is given is read or refused."""

import functools
import os
import threading

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from subtoken_train.cache.cache import PackedCache
from subtoken_train.cache.packed_layer import SLACK
from subtoken_train.families.decoder import CACHE
from subtoken_train.inference.generation import REFUSED, GenerateCall, check_ids, settings_used
from subtoken_train.inference.model import SubTokenModel
from tests.support.generation_cells import PLAIN, batch_of, generate_greedy, inputs_of, model_of, settings_of
from tests.support.refusals import refuses
from tests.support.sampling import sampled


@pytest.mark.parametrize("pad_left", [True, False])
@pytest.mark.parametrize("levels", [{}, PLAIN, {"eviction": "shared_set", "precision": "int8"}])
@sampled("family", ["llava_gqa", "llava_next", "qwen2_5_vl", "llama"], every=4)
def test_generate_equals_generate_greedy(family, levels, pad_left):
    model = model_of(family=family, **levels)
    inputs = inputs_of(model, pad_left=pad_left)
    out = model.generate(**inputs, **settings_of(model), max_new_tokens=10, do_sample=False)
    assert torch.equal(out[:, : inputs["input_ids"].shape[1]], inputs["input_ids"])
    expected = generate_greedy(model.backbone, batch_of(model, inputs), 10, model.compression).token_ids_BT
    assert torch.equal(out[:, inputs["input_ids"].shape[1] :], expected)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llama"])
def test_beams_and_a_second_turn_without_compression_are_those_of_transformers(family):
    model = model_of(family=family, **PLAIN)
    inputs, settings, plain = inputs_of(model), settings_of(model) | {"do_sample": False}, model.backbone.model.generate
    beams = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 8, "pad_token_id": settings["pad_token_id"]}
    assert torch.equal(model.generate(**inputs, **settings | beams), plain(**inputs, **beams, do_sample=False))
    inputs = inputs_of(model, "one")
    first = model.generate(**inputs, **settings, max_new_tokens=5)
    assert {layer.keys.shape[2] for layer in model.last.cache.layers} == {4}
    turn = torch.cat([first, torch.randint(10, 60, (1, 6), generator=torch.Generator().manual_seed(1))], 1)
    shown = {name: each for name, each in inputs.items() if name not in ("input_ids", "attention_mask")}
    if (kinds := shown.get("mm_token_type_ids")) is not None:
        shown["mm_token_type_ids"] = torch.nn.functional.pad(kinds, (0, turn.shape[1] - kinds.shape[1]))
    second = model.generate(input_ids=turn, past_key_values=model.last.cache, max_new_tokens=5, **settings)
    assert torch.equal(second, plain(input_ids=turn, **shown, max_new_tokens=5, do_sample=False))
    assert model.last.prefill_seconds == 0 < model.last.decode_seconds
    assert {layer.keys.shape[2] for layer in model.last.cache.layers} == {4 + 7 + 4}


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")  # no length is named
@pytest.mark.parametrize(("longer", "room"), [(None, SLACK), (9, 8)])
def test_room_is_made_once_where_it_is_known(longer, room):
    model = model_of(family="llama")
    inputs = inputs_of(model)
    settings = {} if longer is None else {"max_length": inputs["input_ids"].shape[1] + longer}
    out = model.generate(**inputs, **settings_of(model), **settings, do_sample=False, return_dict_in_generate=True)
    assert {layer.keys.shape[2] for layer in out[CACHE].layers} == {room}
    assert out[CACHE] is model.last.cache


def test_padded_later_turns_are_refused_and_a_generated_image_token_is_a_token_like_others():
    model = model_of()
    inputs = inputs_of(model)
    out = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    turn = torch.cat([out, torch.full((3, 2), 11)], 1)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 5), value=1)
    for place in (-1, -5):  # a shorter turn; a shorter answer before it
        padded = mask.clone()
        padded[0, place] = 0
        with pytest.raises(ValueError, match="are padded"):
            model.generate(input_ids=turn, attention_mask=padded, past_key_values=model.last.cache, max_new_tokens=2)
    inputs = inputs_of(model, "one")
    forced = torch.cat([inputs["input_ids"], torch.tensor([[model.backbone.family.image_token_id]])], 1)
    model.generate(**inputs, max_new_tokens=1, do_sample=False)
    out = model.generate(input_ids=forced, past_key_values=model.last.cache, max_new_tokens=2, do_sample=False)
    assert out.shape[1] == forced.shape[1] + 2


def hooked(model, forward):
    model._old_forward = forward
    new_forward = functools.partial(lambda own, *args, **given: own._old_forward(*args, **given), model)
    return functools.update_wrapper(new_forward, forward)


@pytest.mark.parametrize("wrap", [lambda _, forward: torch.compile(forward, backend="eager"), hooked])
def test_a_wrapped_forward_is_there_again_after_a_call_and_after_a_fault(wrap):
    model = model_of()
    inner, inputs = model.backbone.model, inputs_of(model, "one")
    expected = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert "forward" not in vars(inner)
    inner.forward = wrapped = wrap(inner, inner.forward)
    inner._compiled_call_impl = never = object()
    try:
        assert torch.equal(model.generate(**inputs, max_new_tokens=3, do_sample=False), expected)
        assert inner.forward is wrapped
        with pytest.raises(ZeroDivisionError):
            model.generate(**inputs, max_new_tokens=3, stopping_criteria=StoppingCriteriaList([lambda *_: 1 / 0]))
        assert inner.forward is wrapped
        assert inner._compiled_call_impl is never
    finally:
        del inner.forward, inner._compiled_call_impl
        vars(inner).pop("_old_forward", None)
    assert torch.equal(model.generate(**inputs, max_new_tokens=3, do_sample=False), expected)
    assert "forward" not in vars(inner)


def test_two_threads_take_turns_or_hear_of_it():
    model = model_of()
    inputs, started, seen = inputs_of(model, "one"), threading.Event(), threading.Event()

    def waiting(ids, scores):
        started.set()
        assert seen.wait(60)
        return torch.zeros(len(ids), dtype=torch.bool)

    expected = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    asked = {**inputs, "max_new_tokens": 3, "stopping_criteria": StoppingCriteriaList([waiting])}
    thread = threading.Thread(target=lambda: model.generate(**asked))
    thread.start()
    assert started.wait(60)
    last = model.last
    for other in (model, SubTokenModel.around(model.backbone)):  # the same weights behind another object
        refuses("one call at a time", other.generate, **inputs, max_new_tokens=3)
    assert model.last is last
    seen.set()
    thread.join(60)
    assert torch.equal(model.generate(**inputs, max_new_tokens=3, do_sample=False), expected)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@sampled("place", ["prefill", "decode"], every=2)
def test_a_fork_made_while_another_thread_generates_can_generate(place):
    """The thread does not exist in the child: what it had begun is undone there, and its call is none."""
    model, started, seen = model_of(), threading.Event(), threading.Event()
    config, layer = model.backbone.family.decoder.config, model.backbone.family.decoder.layers[1]
    asked = {**inputs_of(model, "one"), "max_new_tokens": 3, "do_sample": False}
    expected = model.generate(**asked)
    before = config._attn_implementation, vars(model.backbone.model).get("forward")

    def waiting(*given):
        if threading.current_thread() is thread:
            started.set()
            assert seen.wait(60)
        return torch.zeros(len(given[0]), dtype=torch.bool) if place == "decode" else None

    criteria = StoppingCriteriaList([waiting] if place == "decode" else [])
    thread = threading.Thread(target=lambda: model.generate(**asked, stopping_criteria=criteria))
    hook = layer.register_forward_pre_hook(waiting) if place == "prefill" else None
    thread.start()
    assert started.wait(60)
    if (child := os.fork()) == 0:
        torch.set_num_threads(1)
        back = (config._attn_implementation, vars(model.backbone.model).get("forward")) == before
        os._exit(0 if back and torch.equal(model.generate(**asked), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    refuses("is already generating", model.generate, **asked)
    seen.set()
    thread.join(60)
    if hook is not None:
        hook.remove()
    assert torch.equal(model.generate(**asked), expected)


@pytest.mark.parametrize("family", ["llava_gqa", "qwen2_5_vl", "llama"])
def test_a_packed_cache_is_not_for_transformers_own_calls(family):
    model = model_of(family=family)
    inputs, plain, settings = inputs_of(model, "one"), model.backbone.model, settings_of(model)
    out = model.generate(**inputs, **settings, max_new_tokens=3, do_sample=False)
    longer, words = torch.cat([out, out[:, -1:]], 1), "is read and continued by the SubTokenModel that made it, not by"
    for cache, ids in ((model.last.cache, longer), (PackedCache(len(model.last.cache.layers)), inputs["input_ids"])):
        refuses(words, plain.generate, input_ids=ids, **{CACHE: cache}, max_new_tokens=2)
        refuses(words, plain, input_ids=ids[:, -1:], **{CACHE: cache})
    assert model.last.cache.get_seq_length() == out.shape[1] - 1  # nothing was appended
    again = model.generate(input_ids=longer, **settings, past_key_values=model.last.cache, max_new_tokens=2)
    assert again.shape[1] > longer.shape[1]


def test_a_cache_that_was_reset_says_so():
    model = model_of()
    inputs = inputs_of(model, "one")
    out = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    cache = model.last.cache
    cache.reset()
    again = functools.partial(model.generate, input_ids=out, past_key_values=cache, max_new_tokens=2)
    for call in (again, model.cache_report, cache.branch):
        refuses(r"the cache is empty; generate from the whole prompt", call)
    assert torch.equal(model.generate(**inputs, max_new_tokens=3, do_sample=False), out)


def test_token_types_that_say_nothing_are_dropped_and_a_window_empties_no_region(recwarn):
    model = model_of()
    inputs, greedy = inputs_of(model, "one"), {"max_new_tokens": 3, "do_sample": False}
    nothing = torch.zeros_like(inputs["input_ids"])
    assert torch.equal(model.generate(**inputs, token_type_ids=nothing, **greedy), model.generate(**inputs, **greedy))
    nothing[0, -1] = 1
    with pytest.raises(ValueError, match="token_type_ids does not go with a compressed cache"):
        model.generate(**inputs, token_type_ids=nothing, **greedy)
    recwarn.clear()
    model = model_of(family="qwen2_window", **PLAIN)
    model.generate(**inputs_of(model, "one"), **greedy)
    assert not [each for each in recwarn if "nothing is left" in str(each.message)]


def test_what_describes_a_prompt_is_small_and_counted():
    model = model_of()
    model.generate(**inputs_of(model), max_new_tokens=3)
    batch, layers = model.last.batch, model.last.plan.layers
    tensors = [*vars(batch).values(), *(value for layer in layers for value in vars(layer).values())]
    held = sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
    assert batch.pixel_values is None
    assert model.cache_report().plan_bytes == held > 0
    with pytest.raises(ValueError, match="visual tokens but no pixels, which a cache frees"):
        generate_greedy(model.backbone, batch, 2, model.compression)


FAMILIES = ["llava_gqa", "qwen2_5_vl", "llama"]
GREEDY = {"max_new_tokens": 5, "do_sample": False}

ENDS = [(0, 2), (0, [2, 3]), (0, [2, 0]), (2, 2), (None, 0), (None, [0, 2]), (0, None), (None, None), (55, 2)]
SPECIAL = [{"pad_token_id": pad, "eos_token_id": end} for pad, end in [*ENDS, (torch.tensor(0), torch.tensor([2]))]]


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


@pytest.mark.parametrize(("call", "words"), WRONG_INPUTS.values(), ids=WRONG_INPUTS)
def test_wrong_ids_and_masks_are_worded(call, words):
    refuses(words, call)
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


@sampled(("change", "words"), WRONG_TURNS.values(), ids=WRONG_TURNS, every=2)
def test_wrong_further_turns_are_worded_and_leave_the_cache(change, words):
    model = model_of()
    ids, mask = turn_of(model, inputs_of(model))
    good = {"input_ids": ids, "attention_mask": mask, "past_key_values": model.last.cache, **GREEDY}
    length = model.last.cache.get_seq_length()
    refuses(words, lambda: model.generate(**(good | change(ids, mask))))
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
    out = model.generate(**inputs_of(model, "one"), max_new_tokens=3, num_beams=2, num_return_sequences=2)
    refuses("was left by a beam search", model.generate, input_ids=out, past_key_values=model.last.cache, **GREEDY)


VALUES = {"use_cache": False, "penalty_alpha": 0.6, "guidance_scale": 2.0, "cache_implementation": "static"}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_answer_is_refused_wherever_it_stands(name):
    value, own = VALUES.get(name, True if REFUSED[name] == (False,) else 3), GenerationConfig()
    words = f"{name}.* does not go with a compressed cache.*; leave it out"
    assert len(refuses(words, settings_used, {name: value}, own)) < 220
    given = GenerationConfig()
    setattr(given, name, value)
    refuses(f"{name}.* does not go", settings_used, {"generation_config": given}, own)
    setattr(own, name, value)
    refuses(rf"model\.generation_config\.{name}.* does not go", settings_used, {}, own)
    for neutral in REFUSED[name]:  # a call overrides its model
        assert settings_used({name: neutral}, own)[name] == neutral


def test_copies_of_the_own_configuration_pass_and_settings_have_the_precedence_of_transformers():
    own = GenerationConfig(**{**GenerationConfig._get_default_generation_params(), "num_assistant_tokens": 7})
    own.chat_format = "chatml"
    settings_used({"generation_config": GenerationConfig(**own.to_dict())}, own)
    settings_used(dict.fromkeys(("position_ids", "assistant_model", "maxnewtokens")), own)
    refuses("use_cache=None does not go", settings_used, {"use_cache": None}, own)
    own, settings = GenerationConfig(num_beams=2, pad_token_id=1), {"generation_config": GenerationConfig(num_beams=3)}
    beams = [settings_used(given, own)["num_beams"] for given in ({}, settings, settings | {"num_beams": 4})]
    pads = [settings_used(given, own)["pad_token_id"] for given in (settings, settings | {"pad_token_id": None})]
    assert (beams, pads) == ([2, 3, 4], [1, None])


@pytest.mark.parametrize("name", ["max_newtokens", "use_model_defaults", "logits_to_keep"])
def test_unknown_names_are_refused_and_the_nearest_is_named(name):
    hint = " Did you mean 'max_new_tokens'?" if name == "max_newtokens" else ""
    for given in ({name: 3}, {"generation_config": GenerationConfig(**{name: 3})}):
        refuses(rf"unknown argument of generate '{name}'\.{hint}", settings_used, given, GenerationConfig())
    with pytest.raises(ValueError, match="must be a transformers GenerationConfig, not dict"):
        settings_used({"generation_config": {name: 3}}, GenerationConfig())
    refuses(r"^num_beams=1\.5 must be a whole number$", lambda: settings_used({"num_beams": 1.5}, GenerationConfig()))


def test_a_processor_that_runs_the_model_is_refused():
    model = model_of(**PLAIN)

    def nosy(ids, scores):
        return scores + model.backbone.model(input_ids=ids).logits[:, -1]

    with pytest.raises(ValueError, match="called with another cache while it generated"):
        model.generate(**inputs_of(model), max_new_tokens=2, logits_processor=LogitsProcessorList([nosy]))
