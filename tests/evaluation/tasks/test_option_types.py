"""Options of a wrong type are refused in words before a task meets them."""

from __future__ import annotations

import re
import typing

import pytest

from subtoken_train.evaluation.tasks import TASKS, build_task
from subtoken_train.typed import checked


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("recall", {"num_facts": "x"}, "option num_facts of task recall is 'x'; it must be a whole number"),
        ("recall", {"num_facts": True}, "is True; it must be a whole number"),
        ("textvqa", {"ocr": 1}, "is 1; it must be true or false"),
        ("pope", {"category": None}, "is null; it must be a text"),
        ("coco_caption", {"year": "2014"}, "is '2014'; it must be a whole number"),
        ("ruler", {"tasks": "vt"}, "is 'vt'; it must be a list"),
        ("ruler", {"tasks": ["vt", 3]}, r"tasks of task ruler\[1\] is 3; it must be a text"),
        *((name, {"chat": "yes"}, "chat of task") for name in ("ruler", "ruler_synthetic", "longbench")),
        ("ruler_synthetic", {"tokenizer": 3}, "tokenizer of task ruler_synthetic is 3; it must be a text"),
    ],
)
def test_wrong_types_are_worded(task, options, message):
    with pytest.raises(ValueError, match=message):
        build_task(task, **options)


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("ruler_synthetic", {"samples_per_task": 0}, "samples_per_task of ruler_synthetic is 0; it must be 1 to"),
        ("ruler_synthetic", {"tasks": []}, r"tasks of ruler_synthetic is \[\]; name one or more, each once"),
        ("ruler", {"tasks": ["vt", "vt"]}, "tasks of ruler is .*; name one or more, each once"),
        ("longbench", {"sets": []}, "sets of longbench"),
        ("local_text", {"max_new_tokens": 0}, "max_new_tokens of local_text is 0"),
        ("video_tt", {"frames": -1}, "frames of video_tt is -1; it must be 1 to"),
        ("recall", {"seed": -1}, "seed of recall is -1; it must be 0 to"),
        ("wikitext", {"config": "../x"}, "config of wikitext is '../x'"),
        ("wikitext", {"query_words": 0}, "query_words of wikitext is 0"),
        ("wikitext", {"prefix_words": 0}, "prefix_words of wikitext is 0; it must be 1 to 16,777,216"),
    ],
)
def test_values_out_of_range_are_refused_when_a_task_is_made(task, options, message):
    with pytest.raises(ValueError, match=message):
        build_task(task, **options)


@pytest.mark.parametrize(
    ("name", "option"), [(name, option) for name, task in TASKS.items() for option in task.allowed]
)
def test_a_value_that_an_option_does_not_have(name, option):
    given = {str: "asked", int: -1, tuple: ["asked"]}[type(getattr(TASKS[name](), option))]
    shown = re.escape(repr(given[0] if isinstance(given, list) else given))
    with pytest.raises(ValueError, match=rf"unknown {option} of {name} {shown}\..* Allowed: "):
        build_task(name, **{option: given})


NOT_SERVED = [
    ("ruler_synthetic", {"length": 1000, "tasks": ["cwe"]}, None),
    ("ruler_synthetic", {"length": 100, "tasks": ["niah_single_1"]}, "length leaves -28 tokens or words"),
    ("ruler_synthetic", {"tokenizer": "checkpoints"}, "tokenizer 'checkpoints' cannot be loaded"),
    ("recall", {"context_length": 20}, "24 facts take .* lower num_facts or raise context_length"),
    ("recall", {"context_length": 10_000_000}, "longer than the test split's English"),
    ("recall", {"num_questions": 99}, "num_questions 99 and num_facts 24"),
    ("recall", {"tokenizer": "checkpoints"}, "tokenizer 'checkpoints' cannot be loaded"),
]


@pytest.mark.parametrize(("name", "options", "message"), NOT_SERVED)
def test_what_samples_refuse_is_refused_by_the_check(name, options, message):
    """The words of both are the same; what passes the check has samples."""
    task = build_task(name, **options)
    if message is None:
        task.check_options()
        assert len(task.samples()) == task.expected_rows
        return
    for ask in (task.check_options, task.samples):
        with pytest.raises(ValueError, match=message):
            ask()


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if not task.needs_files])
def test_what_makes_its_own_samples_is_served_by_default(name):
    TASKS[name]().check_options()


@pytest.mark.parametrize("name", TASKS)
def test_every_default_has_its_fields_type(name):
    hints = typing.get_type_hints(TASKS[name])
    for option, value in TASKS[name]().options.items():
        checked(hints[option], list(value) if isinstance(value, tuple) else value, option)
