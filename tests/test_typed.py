"""Strict dataclasses from plain values."""

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from subtoken_train.typed import typed


@dataclass(frozen=True)
class Inner:
    rate: float
    kind: Literal["a", "b"] = "a"


@dataclass(frozen=True)
class Outer:
    count: int
    inner: Inner
    name: str | None = None
    both: int | str = 1
    places: tuple[int, ...] = ()
    words: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    on: bool = False

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(f"count={self.count} must be 0 or more")


GOOD = {"count": 3, "inner": {"rate": 1}}


def test_values_of_the_right_types():
    made = typed(Outer, {**GOOD, "places": [1, 2], "both": "x", "options": {"k": [1]}, "name": None}, "file")
    assert made == Outer(3, Inner(1.0), None, "x", (1, 2), [], {"k": [1]})
    assert isinstance(made.inner.rate, float)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([], "file is []; it must be a group of keys"),
        (None, "file is null"),
        ({"count": 3}, "file: inner is missing"),
        ({}, "file: count, inner are missing"),
        ({**GOOD, "nme": 1}, "Did you mean 'name'"),
        ({**GOOD, 7: 1}, "unknown key 7"),
        ({**GOOD, "count": 3.0}, "file: count is 3.0; it must be a whole number"),
        ({**GOOD, "count": True}, "file: count is True; it must be a whole number"),
        ({**GOOD, "count": "3"}, "file: count is '3'"),
        ({**GOOD, "count": -1}, "count=-1 must be 0 or more"),
        ({**GOOD, "inner": {"rate": float("nan")}}, "file: inner: rate is nan; it must be finite"),
        ({**GOOD, "inner": {"rate": 10**400}}, "it must be finite"),
        ({**GOOD, "inner": {"rate": False}}, "it must be a number"),
        ({**GOOD, "inner": {"rate": 1, "kind": "c"}}, "unknown value 'c'"),
        ({**GOOD, "inner": {"rate": 1, "kind": []}}, "unknown value"),
        ({**GOOD, "name": 5}, "file: name is 5; it must be a text"),
        ({**GOOD, "both": 1.5}, "it must be a whole number or a text"),
        ({**GOOD, "places": [1, "2"]}, "places[1] is '2'"),
        ({**GOOD, "places": {"a": 1}}, "it must be a list"),
        ({**GOOD, "options": {1: 2}}, "options is 1; it must be a text"),
        ({**GOOD, "on": 1}, "it must be true or false"),
        ({**GOOD, "name": ["x" * 1000]}, "..."),
    ],
)
def test_what_is_refused(content, words):
    with pytest.raises(ValueError, match=r"file|count=") as error:
        typed(Outer, content, "file")
    assert words in str(error.value)
    assert len(str(error.value)) < 300
