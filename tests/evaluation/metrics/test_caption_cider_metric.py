"""CIDEr: pycocoevalcap's own figures, the Java tokenizer, and what is missing."""

import shutil

import pytest

from subtoken_train.evaluation.tasks import captions
from subtoken_train.evaluation.tasks.captions import (
    CaptionCider,
    check_tokenizer,
    cider,
    ptb_tokens,
    word_overlap,
)
from tests.support.vqa_cases import reference_cases

needs_java = pytest.mark.skipif(shutil.which("java") is None, reason="the PTB tokenizer is a Java program")
CAPTIONS = [("a dog runs", ["a dog runs fast", "the dog"]), ("ein Hund", ["a cat"]), ("", ["two red cars", "cars"])]


@pytest.fixture
def cases(shared):
    return reference_cases(shared, "caption_cider")


@pytest.fixture
def plain_tokens(monkeypatch):
    """Words in lower case in the tokenizer's place: no Java."""
    monkeypatch.setattr(captions, "ptb_tokens", lambda rows: [[text.lower() for text in row] for row in rows])


def test_cider_of_golden_tokens(cases):
    for case in cases:
        names = list(case["ptb_gts"])
        mean, terms = cider([case["ptb_res"][n] for n in names], [case["ptb_gts"][n] for n in names])
        assert mean == pytest.approx(case["CIDEr"], abs=1e-6)
        assert terms == pytest.approx(case["CIDEr_per_image"], abs=1e-6)


@pytest.mark.slow
@needs_java
def test_tokens_and_metric_of_golden_texts(cases):
    for case in cases:
        names = list(case["gts"])
        assert ptb_tokens([case["gts"][n] for n in names]) == [case["ptb_gts"][n] for n in names]
        metric = CaptionCider()
        for n in names:
            metric.update([case["res"][n]], [{"captions": case["gts"][n]}])
        assert float(metric.compute()["cider"]) == pytest.approx(case["CIDEr"], abs=1e-6)


@needs_java
def test_line_breaks_inside_captions_shift_nothing():
    texts = [["one\rtwo\nthree\u2028four"], ["five\x0bsix\x85seven", ""], ["A man's hat, red."]]
    assert ptb_tokens(texts) == [["one two three four"], ["five six seven", ""], ["a man 's hat red"]]


def test_missing_java_is_said_before_anything_runs(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="no 'java' on the PATH; install a Java runtime"):
        check_tokenizer()


def test_missing_library(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pycocoevalcap, which is missing; .*subtoken_train\[eval\]"):
        check_tokenizer()


def test_words_shared():
    assert word_overlap("A dog, a cat", "a DOG") == pytest.approx(2 * 2 / 6)
    assert word_overlap("", "a dog") == word_overlap("", "") == 0
    assert CaptionCider.score("the dog", {"captions": ["a dog runs fast", "The dog."]}) == 1


def test_ascii_and_other_scripts_survive_the_state(plain_tokens):
    one, batches = CaptionCider(), CaptionCider()
    texts = [("Ein Hündchen \u2028 läuft", ["ein hündchen", "犬が 走る"]), *CAPTIONS]
    one.update([text for text, _ in texts], [{"captions": references} for _, references in texts])
    for text, references in texts:
        batches.update([text], [{"captions": references}])
    assert float(one.compute()["cider"]) == float(batches.compute()["cider"]) > 0
