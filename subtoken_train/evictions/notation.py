"""Evictions as they are written: a method, or wrappers around one, ``ada(critical(expected_attention))``."""

from __future__ import annotations

from subtoken_train.errors import clipped

DEEPEST = 8
"""Methods inside each other; more is a slip of the hand."""


def notation_names(notation: str) -> tuple[str, ...]:
    """Names of a notation, the outermost wrapper's first and the method's last; whether they exist is not asked.

    Raises:
        ValueError: no text, parentheses that do not match, more than ``DEEPEST`` names, or a name that stands twice.
    """
    shown, example = clipped(repr(notation), 60), "write a method, or wrappers around one: ada(critical(snapkv))"
    if not isinstance(notation, str):
        raise ValueError(f"eviction {shown} must be text; {example}")
    opened, closed = notation.count("("), notation.count(")")
    if opened != closed:
        raise ValueError(f"eviction {shown} has {opened:,} of ( and {closed:,} of ); {example}")
    if opened >= DEEPEST:
        raise ValueError(f"eviction {shown} has {opened + 1:,} methods inside each other; at most {DEEPEST} are read")
    body = notation[: len(notation) - closed]
    if ")" in body:
        raise ValueError(f"eviction {shown} cannot be read; {example}")
    names = tuple(body.split("("))
    if "" in names[:-1] or (opened and not names[-1]):
        raise ValueError(f"eviction {shown} has parentheses without a name; {example}")
    twice = [name for i, name in enumerate(names) if name in names[:i]]
    if twice:
        raise ValueError(f"eviction {shown} has {clipped(repr(twice[0]), 40)} twice; each method stands once")
    return names


def innermost(notation: str) -> str:
    """The method that scores, without what is around it.

    Raises:
        ValueError: see ``notation_names``.
    """
    return notation_names(notation)[-1]
