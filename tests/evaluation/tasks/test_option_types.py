"""Options of a wrong type are refused in words before a task meets them."""

from __future__ import annotations

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
        ("ruler_synthetic", {"tokenizer": 3}, "tokenizer of task ruler_synthetic is 3; it must be a text"),
    ],
)
def test_wrong_types_are_worded(task, options, message):
    with pytest.raises(ValueError, match=message):
        build_task(task, **options)


@pytest.mark.parametrize("name", TASKS)
def test_every_default_has_its_fields_type(name):
    hints = typing.get_type_hints(TASKS[name])
    for option, value in TASKS[name]().options.items():
        checked(hints[option], list(value) if isinstance(value, tuple) else value, option)
