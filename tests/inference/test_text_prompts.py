"""Texts become the token ids of lm-evaluation-harness, and log-likelihoods are its, on a trained model."""

from __future__ import annotations

import json
from functools import cache

import pytest

from subtoken_train.datasets.text_batches import context_tokens
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.load import load_family
from subtoken_train.inference.batched import score_batch
from subtoken_train.inference.text_prompts import EncodedText, encode_text, text_batch
from subtoken_train.types import Region
from tests.support.helpers import compress
from tests.support.sampling import sampled
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
        if prompt.startswith("<s>"):
            start = start[1:]
        assert list(got.input_ids) == start
        assert list(ids) == rest
    assert got.input_ids.count(family.tokenizer.bos_token_id) == 1
    assert got.dropped_tokens == 0


def test_without_continuations_nothing_is_stripped():
    family = small()
    assert list(encode_text(family, TEXT + " ").input_ids) == family.tokenizer.encode(TEXT + " ")
    assert encode_text(family, TEXT + " ").input_ids != encode_text(family, TEXT + " ", ["x"]).input_ids


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


def test_the_default_context_is_that_of_prompts():
    family = small()
    for prompt in (TEXT, "word " * 100):
        got = encode_text(family, prompt)
        assert got.context_length == context_tokens(family, list(got.input_ids))
    assert got.context_length > 0


def test_a_batch_has_regions_and_no_labels():
    family = small()
    encoded = [encode_text(family, TEXT, context_characters=30), encode_text(family, "short", [" x"])]
    batch = text_batch(family, encoded)
    for row, text in zip(batch.regions_BN, encoded, strict=True):
        length = len(text.input_ids)
        codes = [Region.CONTEXT] * text.context_length + [Region.QUERY] * (length - text.context_length)
        assert row.tolist() == [*codes, *[Region.PADDING] * (batch.regions_BN.shape[1] - length)]
    assert (batch.labels_BN == -100).all()
    assert batch.rank_position_B.tolist() == [len(text.input_ids) - 1 for text in encoded]
    assert batch.record_ids == [text.record_id for text in encoded]
    assert len(set(batch.record_ids)) == 2


def test_long_prompts_are_cut_only_if_asked():
    family = small()
    full = encode_text(family, TEXT, [" one two three"], context_characters=40)
    room = len(full.continuations[0]) - 1
    fits = len(full.input_ids) + room
    assert encode_text(family, TEXT, [" one two three"], 40, max_length=fits) == full
    with pytest.raises(ValueError, match=f"needs {fits} positions, but there are {fits - 3}"):
        encode_text(family, TEXT, [" one two three"], 40, max_length=fits - 3)
    cut = encode_text(family, TEXT, [" one two three"], 40, max_length=fits - 3, truncate_left=True)
    assert (cut.input_ids, cut.dropped_tokens) == (full.input_ids[3:], 3)
    assert (cut.context_length, cut.continuations) == (full.context_length - 3, full.continuations)
    with pytest.raises(ValueError, match="positions, but there are 3"):
        encode_text(family, TEXT, [" one two three four five six"], max_length=3, truncate_left=True)
    long = encode_text(family, TEXT * 100)
    assert (len(long.input_ids) > 1024, long.dropped_tokens) == (True, 0)
    cut = encode_text(family, TEXT * 100, truncate_left=True)
    assert cut.input_ids == long.input_ids[-1024:]


@pytest.mark.parametrize(
    ("prompt", "words", "characters", "message"),
    [
        ("", [" A"], None, "the prompt is empty"),
        (" \n", [" A"], None, "the prompt is empty"),
        ("", (), 0, "the prompt is empty"),
        ("A", [" B", ""], None, "continuation '' adds no token"),
        ("A b", (), 3, "context_characters=3 must lie between 0 and 2"),
        ("A b", (), -1, "context_characters=-1 must lie"),
    ],
)
def test_mistakes_are_worded(prompt, words, characters, message):
    with pytest.raises(ValueError, match=message):
        encode_text(small(), prompt, words, characters)


def test_other_models_and_slow_tokenizers_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="llava is not a language model"):
        encode_text(family_of("llava"), "A")
    monkeypatch.setattr(type(small().tokenizer), "is_fast", False)
    with pytest.raises(ValueError, match="no character offsets"):
        encode_text(small(), TEXT, context_characters=5)


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
