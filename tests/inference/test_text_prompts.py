"""Texts become the token ids and log-likelihoods of lm-evaluation-harness, and long prompts lose their middle."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest

from checkpoints.tiny_llama import build_tokenizer
from subtoken_train.evaluation.runner.cell import model_inputs
from subtoken_train.evaluation.tasks.task import Sample
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.load import load_family
from subtoken_train.inference.batched import score_batch
from subtoken_train.inference.text_prompts import EncodedText, encode_text, in_chat, text_batch, without_middle
from subtoken_train.types import Region
from tests.support.helpers import compress
from tests.support.sampling import sampled
from tests.support.text_families import text_family
from tests.support.truth_models import family_of

TEXT = "The old man saw a ship.  It was far away, and the sea was calm.\n\nWhere was it?"


@cache
def small():
    return load_family(BackboneConfig(path="checkpoints/tiny-llama"))


def joint(family, prompt: str, continuation: str) -> tuple[list[int], list[int]]:
    spaces = len(prompt) - len(prompt.rstrip())
    if spaces:
        prompt, continuation = prompt[:-spaces], prompt[-spaces:] + continuation
    whole, start = family.tokenizer.encode(prompt + continuation), family.tokenizer.encode(prompt)
    return start, whole[len(start) :]


@pytest.mark.parametrize("prompt", [TEXT, TEXT + " ", TEXT + "\n\n ", "A", "<s>" + TEXT])
def test_pairs_are_encoded_together(prompt):
    family, words = small(), [" far away", "out at sea", "\n", " 7"]
    got = encode_text(family, prompt, words)
    for word, ids in zip(words, got.continuations, strict=True):
        start, rest = joint(family, prompt, word)
        assert (list(got.input_ids), list(ids)) == (start[prompt.startswith("<s>") :], rest)
    assert got.input_ids.count(family.tokenizer.bos_token_id) == 1
    if prompt == TEXT + " ":  # without continuations nothing is stripped
        assert list(encode_text(family, prompt).input_ids) == family.tokenizer.encode(prompt) != list(got.input_ids)


@pytest.mark.parametrize("characters", range(len(TEXT)))
def test_a_token_across_the_boundary_asks(characters):
    family = small()
    got = encode_text(family, TEXT, context_characters=characters)
    offsets = family.tokenizer(TEXT, return_offsets_mapping=True)["offset_mapping"]
    inside = [end <= characters for _, end in offsets]
    assert inside == sorted(inside, reverse=True)
    assert got.context_length == (sum(inside) if characters else 0)
    decoded = family.tokenizer.decode(got.input_ids[: got.context_length], skip_special_tokens=True)
    assert TEXT[:characters].startswith(decoded)


def test_a_prompt_may_take_its_positions_and_no_more():
    family = small()
    full = encode_text(family, TEXT, [" one two three"], context_characters=40)
    fits = len(full.input_ids) + len(full.continuations[0]) - 1
    assert encode_text(family, TEXT, [" one two three"], 40, max_length=fits) == full
    with pytest.raises(ValueError, match=f"needs {fits} positions, but there are {fits - 3}"):
        encode_text(family, TEXT, [" one two three"], 40, max_length=fits - 3)


REFUSED = {
    "empty": (lambda: encode_text(small(), "", [" A"]), "the prompt is empty"),
    "blank": (lambda: encode_text(small(), " \n", [" A"]), "the prompt is empty"),
    "continuation": (lambda: encode_text(small(), "A", [" B", ""]), "continuation '' adds no token"),
    "characters": (lambda: encode_text(small(), "A b", (), 3), "context_characters=3 must lie between 0 and 2"),
    "negative": (lambda: encode_text(small(), "A b", (), -1), "context_characters=-1 must lie"),
    "images": (lambda: encode_text(family_of("llava"), "A"), "llava is not a language model"),
    "slow": (lambda: encode_text(small(), TEXT, context_characters=5), "no character offsets"),
    "room": (lambda: without_middle(small(), words(900), 100, None, 1024), "room for 0 tokens .* beside 1024 of its"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_mistakes_are_worded(name, monkeypatch):
    call, said = REFUSED[name]
    if name == "slow":
        monkeypatch.setattr(type(small().tokenizer), "is_fast", False)
    with pytest.raises(ValueError, match=said):
        call()


@pytest.fixture
def trained(shared):
    golden, folder = shared / "golden_eval" / "lm_loglikelihood" / "set_a.jsonl", shared / "realdata/tinystories/hf"
    if not golden.is_file() or not folder.is_dir():
        pytest.skip("the recorded log-likelihoods or their model are absent")
    return load_family(BackboneConfig(path=str(folder))), [json.loads(x) for x in golden.read_text().splitlines()]


def quadruples(trained):
    family, cases = trained
    cases = [case for case in cases if case["kind"] == "multiple_choice"]
    return cases, [encode_text(family, case["context"], case["continuations"]) for case in cases]


@sampled("batch_size", [1, 24], every=2)
def test_choices_have_the_log_likelihoods_of_lm_eval(trained, batch_size):
    backbone, (cases, encoded) = compress(trained[0]).eval(), quadruples(trained)
    outcomes = []
    for start in range(0, len(encoded), batch_size):
        part = encoded[start : start + batch_size]
        outcomes += score_batch(backbone, text_batch(trained[0], part), [x.continuations for x in part])
    assert outcomes
    for case, outcome in zip(cases, outcomes, strict=True):
        assert outcome.logprobs == pytest.approx(case["loglikelihood"], abs=1e-4)
        assert outcome.greedy == case["is_greedy"]


def rolling(family, text):
    """A whole text as windows that score every token once: disjoint, the last one filled up with older tokens."""
    ids = [family.tokenizer.bos_token_id, *family.tokenizer.encode(text)]
    width, windows = family.decoder.config.max_position_embeddings, []
    for first in range(1, len(ids), width):
        last = min(first + width, len(ids))
        prompt = ids[max(0, last - 1 - width) : first]
        windows.append(EncodedText(tuple(prompt), 0, (tuple(ids[first:last]),), f"window {first}"))
    return windows


def test_whole_texts_have_the_log_likelihoods_of_lm_eval(trained):
    family, cases = trained
    cases = [case for case in cases if case["kind"] == "rolling"]
    assert cases
    for case in cases:
        windows = rolling(family, case["text"])
        found = score_batch(compress(family).eval(), text_batch(family, windows), [w.continuations for w in windows])
        # the recorded sums of several hundred terms are in fp32
        assert sum(x.logprobs[0] for x in found) == pytest.approx(case["loglikelihood"], abs=1e-4, rel=2e-7)


TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m['content'] | trim }}]{% endfor %}>"


@pytest.fixture
def family():
    found = text_family("llama")
    found.processor = build_tokenizer()
    found.model.config.max_position_embeddings = 64
    return found


def words(count):
    return " ".join(f"w{i % 7}" for i in range(count))


def length(family, text):
    return len(family.tokenizer(text)["input_ids"])


def test_both_ends_stay_of_a_prompt_that_does_not_fit(family):
    context, asked, tokenizer = words(60), " Who ran?", family.tokenizer
    ids = tokenizer(context + asked)["input_ids"]
    text, kept = without_middle(family, context + asked, len(context), 21, 4)
    first, last = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:10], ids[-10:]))
    assert text == first + last
    assert (text[kept:], text[:kept].startswith(first)) == (asked, True)
    fits = words(8)
    for most in (length(family, fits), None):
        assert without_middle(family, fits, 5, most, 4) == (fits, 5)


def test_a_question_longer_than_its_half_is_all_that_asks(family):
    context, asked = words(10), " " + words(60)
    text, kept = without_middle(family, context + asked, len(context), 20, 4)
    assert text[kept:] == family.tokenizer.decode(family.tokenizer(context + asked)["input_ids"][-10:])


@sampled(("given", "new_tokens"), [(None, 4), (1000, 4), (None, 40)], every=3)
def test_the_answer_has_room(family, given, new_tokens):
    text, _ = without_middle(family, words(300), 100, given, new_tokens)
    assert 64 - new_tokens - 4 <= length(family, text) <= 64 - new_tokens


def test_chat_templates(family):
    with pytest.raises(ValueError, match=r"has no chat template; ask without one \(chat: false\)"):
        in_chat(family, "x", 1)
    family.tokenizer.chat_template = TEMPLATE
    text, kept = in_chat(family, "  some text Who? ", 11)
    assert text == f"{family.tokenizer.bos_token}[some text Who?]>"
    assert text[:kept].endswith("[some text")
    assert in_chat(family, "Who?", None) == (f"{family.tokenizer.bos_token}[Who?]>", None)
    long, kept = without_middle(family, words(300), 1200, None, 8, chat=True)
    assert length(family, in_chat(family, long, kept)[0].removeprefix(family.tokenizer.bos_token)) <= 64 - 8


def test_samples_become_batches_of_their_regions(family):
    family.tokenizer.chat_template = TEMPLATE
    context, asked = words(200), " Who ran?"
    sample = Sample("a", context + asked, {}, context_characters=len(context), max_new_tokens=8, cut_middle=True)
    for chat in (False, True):
        batch, _ = model_inputs([replace(sample, chat=chat)], family, "text", 30)
        told = batch.regions_BN[0]
        query = batch.input_ids_BN[0, told == Region.QUERY]
        assert family.tokenizer.decode(query).strip() == ("Who ran?]>" if chat else "Who ran?")
        assert 24 <= len(told) <= 40
    with pytest.raises(ValueError, match=r"sample 'a': the prompt needs \d+ positions, but there are 30"):
        model_inputs([replace(sample, cut_middle=False)], family, "text", 30)
