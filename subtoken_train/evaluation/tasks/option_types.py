"""Options of tasks come from YAML and command lines: their types are checked here, their values by the tasks."""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType
from typing import Any, Literal, get_args, get_origin

_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", NoneType: "nothing"}


def check_option(task: str, option: str, value: object, hint: Any) -> None:
    """Raise a worded ``ValueError`` where a value has not the type of the task's field.

    Args:
        task: its name, for the message.
        option: the field's name.
        value: what was given.
        hint: the field's type.
    """
    if not _fits(value, hint):
        raise ValueError(f"option {option} of task {task} must be {_words(hint)}; got {value!r}")


def _fits(value: object, hint: Any) -> bool:
    arguments = get_args(hint)
    if get_origin(hint) is Literal:
        return type(value) in map(type, arguments)
    if get_origin(hint) is Sequence:
        return isinstance(value, Sequence) and not isinstance(value, str) and all(_fits(v, *arguments) for v in value)
    if arguments:
        return any(_fits(value, one) for one in arguments)
    return type(value) is hint


def _words(hint: Any) -> str:
    arguments = get_args(hint)
    if get_origin(hint) is Literal:
        return " or ".join(dict.fromkeys(_WORDS[type(one)] for one in arguments))
    if get_origin(hint) is Sequence:
        return f"a list, each item {_words(*arguments)}"
    return " or ".join(map(_words, arguments)) if arguments else _WORDS.get(hint, str(hint))
