"""``generate`` of transformers on packed caches: its loop, beams, further turns, streamers and criteria."""

from __future__ import annotations

import functools
import os
import threading

import pytest
import torch
from transformers import StoppingCriteriaList

from subtoken_train.cache.cache import PackedCache
from subtoken_train.cache.packed_layer import SLACK
from subtoken_train.families.decoder import CACHE
from subtoken_train.inference.model import SubTokenModel
from tests.support.generation_cells import PLAIN, batch_of, generate_greedy, inputs_of, model_of, settings_of
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
def test_beams_without_compression_are_those_of_transformers(family):
    model = model_of(family=family, **PLAIN)
    inputs = inputs_of(model)
    settings = {"num_beams": 3, "num_return_sequences": 2, "pad_token_id": model.tokenizer.pad_token_id}
    expected = model.backbone.model.generate(**inputs, max_new_tokens=8, do_sample=False, **settings)
    got = model.generate(**inputs, **(settings_of(model) | settings), max_new_tokens=8, do_sample=False)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llama"])
def test_a_second_turn_is_that_of_transformers(family):
    model = model_of(family=family, **PLAIN)
    inputs, settings = inputs_of(model, "one"), settings_of(model) | {"do_sample": False}
    first = model.generate(**inputs, **settings, max_new_tokens=5)
    assert {layer.keys.shape[2] for layer in model.last.cache.layers} == {4}
    turn = torch.cat([first, torch.randint(10, 60, (1, 6), generator=torch.Generator().manual_seed(1))], 1)
    more = turn.shape[1] - inputs["input_ids"].shape[1]
    plain = {name: each for name, each in inputs.items() if name not in ("input_ids", "attention_mask")}
    if (kinds := plain.get("mm_token_type_ids")) is not None:
        plain["mm_token_type_ids"] = torch.nn.functional.pad(kinds, (0, more))
    expected = model.backbone.model.generate(input_ids=turn, **plain, max_new_tokens=5, do_sample=False)
    second = model.generate(input_ids=turn, past_key_values=model.last.cache, max_new_tokens=5, **settings)
    assert torch.equal(second, expected)
    assert model.last.prefill_seconds == 0 < model.last.decode_seconds
    assert {layer.keys.shape[2] for layer in model.last.cache.layers} == {4 + 7 + 4}


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")  # no length is named
@pytest.mark.parametrize(("longer", "room"), [(None, SLACK), (9, 8)])
def test_room_is_made_once_where_it_is_known(longer, room):
    model = model_of(family="llama")
    inputs = inputs_of(model)
    settings = {} if longer is None else {"max_length": inputs["input_ids"].shape[1] + longer}
    model.generate(**inputs, **settings_of(model), **settings, do_sample=False)
    assert {layer.keys.shape[2] for layer in model.last.cache.layers} == {room}


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


def compiled(model, forward):
    return torch.compile(forward, backend="eager")


def hooked(model, forward):
    model._old_forward = forward
    new_forward = functools.partial(lambda own, *args, **given: own._old_forward(*args, **given), model)
    return functools.update_wrapper(new_forward, forward)


@pytest.mark.parametrize("wrap", [compiled, hooked])
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
        with pytest.raises(ValueError, match="one call at a time"):
            other.generate(**inputs, max_new_tokens=3)
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
    with pytest.raises(ValueError, match="is already generating"):  # here it does
        model.generate(**asked)
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
    empty = PackedCache(len(model.last.cache.layers))
    for cache, ids in ((model.last.cache, longer), (empty, inputs["input_ids"])):
        with pytest.raises(ValueError, match=words):
            plain.generate(input_ids=ids, **{CACHE: cache}, max_new_tokens=2)
        with pytest.raises(ValueError, match=words):
            plain(input_ids=ids[:, -1:], **{CACHE: cache})
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
        with pytest.raises(ValueError, match=r"the cache is empty \(no prompt was put in, or reset\(\) took it out\)"):
            call()
    assert torch.equal(model.generate(**inputs, max_new_tokens=3, do_sample=False), out)


def test_token_types_that_say_nothing_are_dropped():
    model = model_of()
    inputs = inputs_of(model, "one")
    expected = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    nothing = torch.zeros_like(inputs["input_ids"])
    got = model.generate(**inputs, token_type_ids=nothing, max_new_tokens=3, do_sample=False)
    assert torch.equal(got, expected)
    nothing[0, -1] = 1
    with pytest.raises(ValueError, match="token_type_ids does not go with a compressed cache"):
        model.generate(**inputs, token_type_ids=nothing, max_new_tokens=3)


def test_a_window_empties_no_region(recwarn):
    model = model_of(family="qwen2_window", **PLAIN)
    model.generate(**inputs_of(model, "one"), max_new_tokens=2, do_sample=False)
    assert not [each for each in recwarn if "nothing is left" in str(each.message)]


def test_what_describes_a_prompt_is_small_and_counted():
    model = model_of()
    model.generate(**inputs_of(model), max_new_tokens=3)
    batch, plan = model.last.batch, model.last.plan
    assert batch.pixel_values is None
    tensors = [*vars(batch).values(), *(value for layer in plan.layers for value in vars(layer).values())]
    held = sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
    report = model.cache_report()
    assert report.plan_bytes == held > 0
    with pytest.raises(ValueError, match="visual tokens but no pixels, which a cache frees"):
        generate_greedy(model.backbone, batch, 2, model.compression)
