"""The benchmarks by name: a row of ``tasks.csv`` says what one is, and its class what it does its own way."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from subtoken_train.errors import check_word
from subtoken_train.evaluation.tasks.table import TASK_ROWS
from subtoken_train.registry import Registry
from subtoken_train.typed import checked

if TYPE_CHECKING:
    from subtoken_train.evaluation.tasks.task import Task

TASKS: "Registry[Task]" = Registry(
    "task",
    group="subtoken_train.tasks",
    package=__name__,
    base="task:Task",
    named=True,
    builtin={name: f"task:{name}" for name in TASK_ROWS},
)


def build_task(name: str, source: str | Path | None = None, **options: Any) -> "Task":
    """Build a task by its name, with some of its options changed; without a source it is its own Hub id."""
    task = TASKS.find(name)
    known = [field.name for field in dataclasses.fields(task) if field.name != "source"]
    hints = get_type_hints(task)
    for option, value in options.items():
        check_word(f"option of task {name}", option, known)
        given = list(value) if isinstance(value, tuple) else value
        options[option] = checked(hints[option], given, f"option {option} of task {name}")
    return task(source=source, **options)
