"""COCO Captions and TextCaps: prompt and references; CIDEr: pycocoevalcap's own figures, and the Java tokenizer."""

import shutil

import pytest

from subtoken_train.datasets.image_sources import open_image
from subtoken_train.evaluation.tasks import build_task
from subtoken_train.evaluation.tasks.captions import CaptionCider, cider, ptb_tokens, word_overlap
from tests.support.benchmark_folders import reference_cases, refused, write_rows
from tests.support.refusals import refuses

needs_java = pytest.mark.skipif(shutil.which("java") is None, reason="the PTB tokenizer is a Java program")
COLUMNS = {"coco_caption": ("question_id", "answer"), "textcaps": ("image_id", "caption_str")}


def parquet(folder, name, *captions):
    rows = [dict(zip(COLUMNS[name], pair, strict=True)) for pair in captions]
    return write_rows(folder, "data/val-00000-of-00001", rows)


@pytest.mark.parametrize("name", COLUMNS)
def test_samples(tmp_path, name):
    folder = parquet(tmp_path, name, ("one.jpg", ["A dog.", "dogs"]), ("two.jpg", ["A cat."]))
    first, second = build_task(name, folder).samples()
    prompt = "<image>\nProvide a one-sentence caption for the provided image."
    assert (first.id, first.prompt, first.reference) == ("one.jpg", prompt, {"captions": ["A dog.", "dogs"]})
    assert (second.id, second.max_new_tokens, second.choices) == ("two.jpg", 64, ())
    assert open_image(first.images[0]).size == (2, 2)
    later = build_task("coco_caption", year=2017)
    assert (later.source, later.expected_rows) == ("lmms-lab/COCO-Caption2017", 5_000)


def test_captions_that_cannot_be_scored(tmp_path):
    """None at all, and one that is no list, which would be taken letter by letter."""
    words = "no answers, so this is another split's file; use that of 'val'"
    refused(words, "textcaps", parquet(tmp_path / "a", "textcaps", ("one", [])))
    words = r"row 1: caption_str is 'A dog\.', but must be a list of texts"
    refused(words, "textcaps", parquet(tmp_path / "b", "textcaps", ("one", "A dog.")))


@pytest.fixture
def cases(shared):
    return reference_cases(shared, "caption_cider")


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
        assert metric.compute()["cider"] == pytest.approx(case["CIDEr"], abs=1e-6)


@needs_java
def test_line_breaks_inside_captions_shift_nothing():
    texts = [["one\rtwo\nthree\u2028four"], ["five\x0bsix\x85seven", ""], ["A man's hat, red."]]
    assert ptb_tokens(texts) == [["one two three four"], ["five six seven", ""], ["a man 's hat red"]]


def test_what_is_missing_stops_before_a_model_runs(monkeypatch):
    monkeypatch.setenv("PATH", "")
    refuses("no 'java' on the PATH; install a Java runtime", build_task("textcaps").check_requirements)
    monkeypatch.setattr("subtoken_train.errors.find_spec", lambda name: None)
    refuses(r"pycocoevalcap, which is not installed: .*\[eval\]", build_task("textcaps").check_requirements)


def test_words_shared():
    assert word_overlap("A dog, a cat", "a DOG") == pytest.approx(2 * 2 / 6)
    assert word_overlap("", "a dog") == word_overlap("", "") == 0
    assert CaptionCider.score("the dog", {"captions": ["a dog runs fast", "The dog."]}) == 1
