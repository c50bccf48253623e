"""One's own questions: the format, every way to break it, and scores by rule."""

import json

import pytest

from subtoken_train.evaluation.tasks import build_task
from subtoken_train.evaluation.tasks.local import RULES, LocalScores
from tests.support.vqa_cases import refused

LINE = {"image": "cat.png", "question": "What is this?", "answers": ["cat", "a cat"], "metric": "exact_match"}


def write(folder, *lines):
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def without(*keys, **changes):
    return {key: value for key, value in (LINE | changes).items() if key not in keys}


def test_samples(tmp_path):
    two = without(image=["a.png", "b/c.png"], question="Same as <image> or <image>?", id=7, kind="pairs", answers="no")
    path = write(tmp_path, LINE, two, without("image", metric="contains"))
    task = build_task("local", path)
    first, second, third = task.samples()
    assert (first.id, first.prompt, first.kind) == ("1", "<image>\nWhat is this?", "exact_match")
    assert first.images == (tmp_path / "cat.png",)
    assert (second.id, second.prompt, second.kind) == ("7", "Same as <image> or <image>?", "pairs")
    assert second.images == (tmp_path / "a.png", tmp_path / "b" / "c.png")
    assert second.reference == {"answers": ["no"], "metric": "exact_match"}
    assert (third.prompt, third.images) == ("What is this?", ())
    assert build_task("local", tmp_path).samples() == [first, second, third]
    metric = task.metric()
    metric.update(["a cat.", "yes", "some cat"], [sample.reference for sample in (first, second, third)])
    assert metric.compute()["score"] == pytest.approx(2 / 3)


def test_modality_is_the_tasks(tmp_path):
    path = write(tmp_path, without("image"))
    assert build_task("local_text", path).samples()[0].prompt == "What is this?"
    refused("no line has an image; use the task local_text", "local", path)
    refused(r"line 1: there is an image; use the task local$", "local_text", write(tmp_path, LINE))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (without("answers"), "no column answers"),
        (without(answers=[]), r"answers must be a text or a list of texts, got \[\]"),
        (without(answers=[1]), r"answers must be a text or a list of texts, got \[1\]"),
        (without(question=""), "question must be a text that is not empty"),
        (without(metric="cider"), "unknown metric 'cider'. Allowed: anls, contains, exact_match, relaxed, vqa"),
        (without(metric="vqa"), "metric vqa needs 4 people's answers or more, got 2"),
        (without(id=None), "id must be a text or a number, got None"),
        (without(image=3), "image must be a text or a list of texts, got 3"),
        (without(images="a.png"), "unknown key 'images'. Did you mean 'image'?"),
        (without(question="<image> <image>"), "2 <image> in the question, 1 images; write one for each"),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, message):
    path = write(tmp_path, LINE, line)
    refused(rf"questions.jsonl, line 2: {message}", "local", path)


def test_files(tmp_path):
    refused(r"task local needs a source. write a .jsonl file", "local")
    refused(r"has 0 .jsonl files; name the file that is meant", "local", tmp_path)
    refused("line 2: id '1' appears twice, first in", "local", write(tmp_path, LINE, LINE | {"id": "1"}))


@pytest.mark.parametrize(
    ("rule", "prediction", "answers", "expected"),
    [
        ("exact_match", " A Cat. ", ["dog", "a cat"], 1),
        ("exact_match", "a cat!", ["a cat"], 0),
        ("contains", "It is a CAT", ["dog", "cat"], 1),
        ("contains", "it is", ["cat"], 0),
        ("relaxed", "10.4", ["7", "10"], 1),
        ("relaxed", "10.6", ["10"], 0),
        ("anls", "helo", ["hello"], 0.8),
        ("anls", "xyz", ["hello"], 0),
        ("vqa", "two", ["2"] * 3 + ["three"] * 7, (7 * 1 + 3 * 2 / 3) / 10),
    ],
)
def test_rules(rule, prediction, answers, expected):
    reference = {"answers": answers, "metric": rule}
    assert LocalScores.score(prediction, reference) == pytest.approx(expected, abs=1e-9)


def test_means_by_rule():
    metric = LocalScores()
    metric.update(
        ["a", "b", "c"],
        [
            {"answers": ["a"], "metric": "exact_match"},
            {"answers": ["x"], "metric": "exact_match"},
            {"answers": ["c"], "metric": "contains"},
        ],
    )
    found = metric.compute()
    assert found == {"score": pytest.approx(2 / 3), "exact_match": 0.5, "contains": 1}
    assert set(LocalScores.names) == {"score", *RULES}
