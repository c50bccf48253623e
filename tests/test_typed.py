"""Strict dataclasses from plain values."""

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from subtoken_train.typed import Written, built, filled, keys_of, plan_of, typed, written_as


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
        ({**GOOD, "inner": {"rate": 1, "kind": "c"}}, "unknown kind 'c'"),
        ({**GOOD, "inner": {"rate": 1, "kind": []}}, "unknown kind"),
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


class Built:
    """Neither a dataclass nor without a group."""

    def __init__(self, inner: Inner, *, outer: Inner | None = None, size: int | float = 1, words: str = "") -> None:
        self.made = (inner, outer, size, words)


@pytest.mark.parametrize(
    ("hint", "text", "value"),
    [
        (float, "1e-4", 1e-4),
        (int | float, "5", 5),
        (int | float, "0.5", 0.5),
        (str, "5", "5"),
        (str | None, "null", None),
        (int | str, "5", 5),
        (bool, "true", True),
        (tuple[str, ...], "[a, b]", ("a", "b")),
        (Any, "a", "a"),
    ],
)
def test_a_text_of_a_command_line_is_read_as_what_is_asked_for(hint, text, value):
    found = written_as(hint, Written(text), "key")
    assert (found, type(found)) == (value, type(value))


def test_texts_in_a_mapping_and_in_a_file():
    given = {"a": Written("4"), "b": {"c": Written("1e-4"), "d": Written("x3"), "e": Written("false")}, "f": "5"}
    assert written_as(dict[str, Any], given, "key") == {"a": 4, "b": {"c": 1e-4, "d": "x3", "e": False}, "f": "5"}
    assert written_as(str | int, "5", "key") == "5"
    assert written_as(int | None, "5", "key") == 5
    with pytest.raises(ValueError, match="key is 'true'; it must be true or false"):
        written_as(bool, "true", "key")


def test_nested_settings_are_filled_and_built():
    plan = plan_of(Built)
    assert [key for key, is_group in keys_of(plan) if is_group] == ["inner", "outer"]
    values = filled(plan, {"inner": {"rate": 1}, "outer": {"rate": 2, "kind": "b"}})
    assert values.inner == {"rate": 1.0, "kind": "a"}
    assert built(plan, values).made == (Inner(1.0), Inner(2.0, "b"), 1, "")
    assert built(plan, filled(plan, {"inner": {"rate": 1}})).made[1] is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, "inner.rate is not set"),
        ({"inner": None}, "inner is null; give it a value"),
        ({"inner": Written("null")}, "inner is null"),
        ({"inner": 3}, "inner is 3; it must be a group of keys"),
        ({"inner": {"rate": 1}, "outer": []}, r"outer is \[\]; it must be a group of keys or null"),
        ({"inner": {"rate": 1, "kind": "c"}}, "unknown inner.kind 'c'"),
        ({"inner": {"rate": "x"}}, "inner.rate is 'x'; it must be a number"),
    ],
)
def test_nested_settings_that_are_refused(content, words):
    with pytest.raises(ValueError, match=words):
        filled(plan_of(Built), content)
