"""Mistakes that are refused in words: one call, or a table of calls that one test runs."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest


def refuses(words: str, act: Callable[..., Any], *given: Any, **more: Any) -> str:
    """Check that a call is refused with these words, a regular expression; the whole message."""
    with pytest.raises(ValueError, match=words) as caught:
        act(*given, **more)
    return str(caught.value)


def refusing(rows: Mapping[Any, Any] | Iterable[Any], act: Callable[..., Any] | None = None) -> Callable[..., None]:
    """Return a test of every row (..., words): ``act``, or its first, is refused of the rest, and of named fixtures."""
    every = list(rows.values() if isinstance(rows, Mapping) else rows)
    names = list(rows) if isinstance(rows, Mapping) else [words[:50] for *_, words in every]

    @pytest.mark.parametrize("row", every, ids=map(str, names))
    def test(request: pytest.FixtureRequest, row: Any) -> None:
        *given, words = row
        call = given.pop(0) if act is None else act
        fixtures = list(inspect.signature(call).parameters)[len(given) :]
        refuses(words, call, *given, *map(request.getfixturevalue, fixtures))

    return test
