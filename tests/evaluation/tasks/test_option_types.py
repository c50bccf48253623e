"""Options of a wrong type are refused in words before a task meets them."""

from __future__ import annotations

import typing

import pytest

from subtoken_train.evaluation.tasks import TASKS, build_task
from subtoken_train.evaluation.tasks.task import check_option


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("recall", {"num_facts": "x"}, "option num_facts of task recall must be a whole number; got 'x'"),
        ("recall", {"num_facts": True}, "must be a whole number; got True"),
        ("textvqa", {"ocr": 1}, "must be true or false; got 1"),
        ("pope", {"category": None}, "must be text; got None"),
        ("coco_caption", {"year": "2014"}, "must be a whole number; got '2014'"),
        ("ruler", {"tasks": "vt"}, "must be a list, each item text; got 'vt'"),
        ("ruler", {"tasks": ["vt", 3]}, "must be a list, each item text"),
        ("ruler_synthetic", {"tokenizer": 3}, "must be text or nothing; got 3"),
    ],
)
def test_wrong_types_are_worded(task, options, message):
    with pytest.raises(ValueError, match=message):
        build_task(task, **options)


@pytest.mark.parametrize("name", TASKS)
def test_every_default_has_its_fields_type(name):
    hints = typing.get_type_hints(TASKS[name])
    for option, value in TASKS[name]().options.items():
        check_option(name, option, value, hints[option])
