"""Readers of other people's files, and strict dataclasses: a plain value of the right type, or one worded error."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import subtoken_train
from subtoken_train.documents import MAX_DEPTH, parse_json, parse_yaml, read_json, read_text, read_yaml, real_path
from subtoken_train.typed import Written, built, filled, plan_of, typed, written_as
from tests.support.refusals import refuses

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


def test_json_that_is_read():
    assert parse_json('{"a": [1, null, "x"]}', "p") == {"a": [1, None, "x"]}
    assert parse_json("[" * MAX_DEPTH + "]" * MAX_DEPTH, "p") is not None
    assert parse_json("[Infinity]", "p", constants=True) == [float("inf")]


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)
)

REFUSED = {
    parse_json: [
        ("{", "invalid JSON (Expecting property name"), ('{"a": 1, "a": 2}', "key 'a' appears twice"),
        ("[NaN]", "NaN is not a JSON number"), ("[-Infinity]", "-Infinity is not a JSON number"),
        ("[" * 100_000, "nested deeper than 64"), ("[" * 65 + "]" * 65, "nested deeper than 64"),
        ("9" * 5_000, "invalid JSON"), (b"\xff", "not UTF-8 (byte 0)"),
    ],
    parse_yaml: [
        ("a: [", "invalid YAML"), ("a: 1\na: 2", "key 'a' appears twice"), ("a: &x [*x]", "an alias that holds itself"),
        ("&x {a: *x}", "an alias that holds itself"), (BOMB, "more than 100,000 values"),
        ("[" * 100_000, "nested deeper than 64"), ("!!python/object/apply:os.system [touch x]", "invalid YAML"),
        ("? [a]\n: b", "invalid YAML (a list or a group as a key)"), ("a: 1\n---\nb: 2", "invalid YAML"),
        ("a: 2024-13-45", "invalid YAML"), ("\x00", "invalid YAML"), ("!!pairs [a: 1]", "the tag !!pairs is not read"),
        ("x: !!omap [a: 1]", "the tag !!omap is not read"), ("- !!set {a}", "the tag !!set is not read"),
        ("!!binary YQ==", "the tag !!binary is not read"),
        ("%TAG ! tag:yaml.org,2002:\n--- !set {a}", "the tag !!set is not read"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("parse", "text", "words"), [(parse, *each) for parse in REFUSED for each in REFUSED[parse]])
def test_what_is_refused(parse, text, words):
    said = refuses(r"^place", parse, text, "place")
    assert words in said
    assert len(said) < 400


def test_yaml_that_is_read():
    assert parse_yaml("base: &b {x: 1}\nmore: {<<: *b, y: 2}\nagain: *b", "p") == {
        "base": {"x": 1}, "more": {"x": 1, "y": 2}, "again": {"x": 1},
    }  # fmt: skip
    assert parse_yaml("", "p") is None


@pytest.mark.slow
@given(values)
def test_what_yaml_writes_is_read_back(value):
    text = yaml.safe_dump(value)
    assert parse_yaml(text, "p") == yaml.safe_load(text)


@given(st.text())
def test_any_text_is_a_value_or_a_worded_error(text):
    for parse in (parse_yaml, parse_json):
        said = "place"
        try:
            parse(text, "place")
        except ValueError as error:
            said = str(error)
        assert said.startswith("place")


def test_only_regular_files_of_a_sensible_size(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_text("x" * 11)
    (tmp_path / "bytes").write_bytes(b"ab\xfe")
    for name, words in (("pipe", "regular file"), ("large", "11 bytes; at most 10"), ("bytes", "not UTF-8 (byte 2)")):
        assert words in refuses(name, read_text, tmp_path / name, max_bytes=10)
    refuses("not a regular file", read_json, tmp_path)
    with pytest.raises(FileNotFoundError):
        read_yaml(tmp_path / "none")


def test_no_path_is_resolved_where_a_loop_of_links_raises(tmp_path):
    """Path.resolve raises RuntimeError in a loop; ``real_path`` gives it to whoever opens it."""
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    assert real_path(tmp_path / "link" / ".." / "loop").name == "loop"
    assert real_path(tmp_path / "link" / ".") == tmp_path / "folder"
    package = Path(subtoken_train.__file__).parent
    calls = {path.name for path in package.rglob("*.py") if ".resolve()" in path.read_text()}
    assert calls == {"resources.py"}  # the package's own place


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
        ([], "file is []; it must be a group of keys"), (None, "file is null"),
        ({"count": 3}, "file: inner is missing"), ({}, "file: count, inner are missing"),
        ({**GOOD, "nme": 1}, "Did you mean 'name'"), ({**GOOD, 7: 1}, "unknown key 7"),
        ({**GOOD, "count": 3.0}, "file: count is 3.0; it must be a whole number"),
        ({**GOOD, "count": True}, "file: count is True; it must be a whole number"),
        ({**GOOD, "count": "3"}, "file: count is '3'"), ({**GOOD, "count": -1}, "count=-1 must be 0 or more"),
        ({**GOOD, "inner": {"rate": float("nan")}}, "file: inner: rate is nan; it must be finite"),
        ({**GOOD, "inner": {"rate": 10**400}}, "it must be finite"),
        ({**GOOD, "inner": {"rate": False}}, "it must be a number"),
        ({**GOOD, "inner": {"rate": 1, "kind": "c"}}, "unknown kind 'c'"),
        ({**GOOD, "inner": {"rate": 1, "kind": []}}, "unknown kind"),
        ({**GOOD, "name": 5}, "file: name is 5; it must be a text"),
        ({**GOOD, "both": 1.5}, "it must be a whole number or a text"),
        ({**GOOD, "places": [1, "2"]}, "places[1] is '2'"), ({**GOOD, "places": {"a": 1}}, "it must be a list"),
        ({**GOOD, "options": {1: 2}}, "options is 1; it must be a text"),
        ({**GOOD, "on": 1}, "it must be true or false"), ({**GOOD, "name": ["x" * 1000]}, "..."),
    ],
)  # fmt: skip
def test_values_of_the_wrong_types(content, words):
    said = refuses(r"file|count=", typed, Outer, content, "file")
    assert words in said
    assert len(said) < 300


class Built:
    """Neither a dataclass nor without a group."""

    def __init__(
        self,
        inner: Inner,
        *,
        outer: Inner | None = None,
        size: int | float = 1,
        words: str = "",
        folder: str | Path | None = None,
    ) -> None:
        self.made = (inner, outer, size, words)


@pytest.mark.parametrize(
    ("hint", "text", "value"),
    [
        (float, "1e-4", 1e-4), (int | float, "5", 5), (int | float, "0.5", 0.5), (str, "5", "5"),
        (str | None, "null", None), (int | str, "5", 5), (bool, "true", True), (tuple[str, ...], "[a, b]", ("a", "b")),
        (Any, "a", "a"),
    ],
)  # fmt: skip
def test_a_text_of_a_command_line_is_read_as_what_is_asked_for(hint, text, value):
    found = written_as(hint, Written(text), "key")
    assert (found, type(found)) == (value, type(value))


def test_texts_in_a_mapping_and_in_a_file():
    given = {"a": Written("4"), "b": {"c": Written("1e-4"), "d": Written("x3"), "e": Written("false")}, "f": "5"}
    assert written_as(dict[str, Any], given, "key") == {"a": 4, "b": {"c": 1e-4, "d": "x3", "e": False}, "f": "5"}
    assert written_as(str | int, "5", "key") == "5"
    assert written_as(int | None, "5", "key") == 5
    refuses("key is 'true'; it must be true or false", written_as, bool, "true", "key")


def test_nested_settings_are_filled_and_built():
    plan = plan_of(Built)
    values = filled(plan, {"inner": {"rate": 1}, "outer": {"rate": 2, "kind": "b"}})
    assert values.inner == {"rate": 1.0, "kind": "a"}
    assert built(plan, values).made == (Inner(1.0), Inner(2.0, "b"), 1, "")
    assert built(plan, filled(plan, {"inner": {"rate": 1}})).made[1] is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, "inner.rate is not set"), ({"inner": None}, "inner is null; give it a value"),
        ({"inner": Written("null")}, "inner is null"), ({"inner": 3}, "inner is 3; it must be a group of keys"),
        ({"inner": {"rate": 1}, "outer": []}, r"outer is \[\]; it must be a group of keys or null"),
        ({"inner": {"rate": 1, "kind": "c"}}, "unknown inner.kind 'c'"),
        ({"inner": {"rate": "x"}}, "inner.rate is 'x'; it must be a number"),
        ({"inner": {"rate": 1}, "folder": []}, r"folder is \[\]; it must be a text or Path or null"),
    ],
)  # fmt: skip
def test_nested_settings_that_are_refused(content, words):
    refuses(words, filled, plan_of(Built), content)
