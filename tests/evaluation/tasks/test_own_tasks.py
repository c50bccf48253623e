"""One's own questions, the embedded models' tasks, and every task's options."""

import re
import typing

import pytest
from transformers import AutoTokenizer

from subtoken_train.datasets.scenes import write_scene_split
from subtoken_train.evaluation.tasks import TASKS, build_task
from subtoken_train.evaluation.tasks.local import RULES, LocalScores
from subtoken_train.resources import resource
from subtoken_train.typed import checked
from tests.support.benchmark_folders import listed, refused, write_jsonl
from tests.support.refusals import refuses

LINE = {"image": "cat.png", "question": "What is this?", "answers": ["cat", "a cat"], "metric": "exact_match"}


def write(folder, *lines):
    return write_jsonl(folder, "questions.jsonl", lines) / "questions.jsonl"


def without(*keys, **changes):
    return {key: value for key, value in (LINE | changes).items() if key not in keys}


def test_samples(tmp_path):
    two = without(image=["a.png", "b/c.png"], question="Same as <image> or <image>?", id=7, kind="pairs", answers="no")
    task = build_task("local", write(tmp_path, LINE, two, without("image", metric="contains")))
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
    assert metric.compute() == {"score": pytest.approx(2 / 3), "exact_match": 0.5, "contains": 1}
    assert set(LocalScores.names) == {"score", *RULES}


def test_modality_is_the_tasks(tmp_path):
    path = write(tmp_path, without("image"))
    assert build_task("local_text", path).samples()[0].prompt == "What is this?"
    refused("no line has an image; use the task local_text", "local", path)
    refused(r"line 1: it has an image, .* use the task local$", "local_text", write(tmp_path, LINE))
    refused("line 2: id '1' appears twice, first in", "local", write(tmp_path, LINE, LINE | {"id": "1"}))
    refused(r"task local needs a source. write a .jsonl file", "local")
    (tmp_path / "questions.jsonl").unlink()
    refused(r"has 0 .jsonl files; name the file that is meant", "local", tmp_path)


@pytest.mark.parametrize(("line", "message"), listed("test_a_broken_line_is_named"))
def test_a_broken_line_is_named(tmp_path, line, message):
    refused(rf"questions.jsonl, line 2: {message}", "local", write(tmp_path, LINE, line))


@pytest.mark.parametrize(("rule", "prediction", "answers", "expected"), listed("test_rules"))
def test_rules(rule, prediction, answers, expected):
    assert LocalScores.score(prediction, {"answers": answers, "metric": rule}) == pytest.approx(expected, abs=1e-9)


STYLES = ("pope", "textvqa", "gqa", "mmbench", "caption")


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scenes")
    write_scene_split(folder, "test", 100, seed=1)
    return folder


def test_every_record_is_in_one_task(scenes):
    refused("subtoken-train data scenes", "scenes_gqa")
    sample = build_task("scenes_pope", scenes).samples()[0]
    assert sample.prompt.startswith("<image>\nis there a ")
    assert sample.images == (scenes / "test" / f"{sample.id.removeprefix('test-')}.jpg",)
    samples = [sample for style in STYLES for sample in build_task(f"scenes_{style}", scenes).samples()]
    assert sorted(sample.id for sample in samples) == [f"test-{i:06d}" for i in range(100)]
    assert {sample.kind for sample in samples} == {
        "exists", "exists_color", "read", "color", "where", "count", "choice", "describe", "list",
    }  # fmt: skip


def test_recall_is_text_with_its_context_marked():
    task = build_task("recall", contexts=12, context_length=256, num_facts=10, num_questions=3)
    samples = task.samples()
    assert [sample.id for sample in samples] == [f"test-{i:06d}" for i in range(12)]
    tokenizer = AutoTokenizer.from_pretrained(resource("checkpoints/tiny-llama"))
    for sample in samples:
        context, question = sample.prompt[: sample.context_characters], sample.prompt[sample.context_characters :]
        assert question.startswith("\nCodes of ")
        assert len(sample.reference["codes"]) == 3
        assert all(f" Code {name} {code}." in context for name, code in sample.reference["codes"].items())
        assert abs(len(tokenizer(context)["input_ids"]) - 256) <= 3
    assert len({sample.max_new_tokens for sample in samples}) == 1
    assert [sample.prompt for sample in task.samples()] == [sample.prompt for sample in samples]


def test_recall_takes_a_split_and_a_seed():
    options = {"contexts": 2, "context_length": 256, "num_facts": 10, "num_questions": 3, "split": "dev"}
    first, second = (build_task("recall", seed=seed, **options).samples() for seed in (0, 1))
    assert [sample.id for sample in first] == [sample.id for sample in second] == ["dev-000000", "dev-000001"]
    assert {sample.prompt for sample in first}.isdisjoint(sample.prompt for sample in second)


@pytest.mark.parametrize(("task", "options", "message"), listed("test_options_that_are_refused_when_a_task_is_made"))
def test_options_that_are_refused_when_a_task_is_made(task, options, message):
    refuses(message, build_task, task, **options)


@pytest.mark.parametrize(("name", "option"), [(name, each) for name, task in TASKS.items() for each in task.allowed])
def test_a_value_that_an_option_does_not_have(name, option):
    given = {str: "asked", int: -1, tuple: ["asked"]}[type(getattr(TASKS[name](), option))]
    shown = re.escape(repr(given[0] if isinstance(given, list) else given))
    refuses(rf"unknown {option} of {name} {shown}\..* Allowed: ", build_task, name, **{option: given})


@pytest.mark.parametrize(("name", "options", "message"), listed("test_what_samples_refuse_is_refused_by_the_check"))
def test_what_samples_refuse_is_refused_by_the_check(name, options, message):
    """The words of both are the same; what passes the check has samples."""
    task = build_task(name, **options)
    if message is None:
        task.check_options()
        assert len(task.samples()) == task.expected_rows
        return
    for ask in (task.check_options, task.samples):
        refuses(message, ask)


@pytest.mark.parametrize("name", TASKS)
def test_every_default_has_its_fields_type(name):
    hints = typing.get_type_hints(TASKS[name])
    if not TASKS[name].needs_files:
        TASKS[name]().check_options()
    for option, value in TASKS[name]().options.items():
        checked(hints[option], list(value) if isinstance(value, tuple) else value, option)
