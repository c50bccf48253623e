"""What the readers of other people's files promise: a plain value or one worded error."""

import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import subtoken_train
from subtoken_train.documents import MAX_DEPTH, parse_json, parse_yaml, read_json, read_text, read_yaml, real_path

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
        ("{", "invalid JSON (Expecting property name"),
        ('{"a": 1, "a": 2}', "key 'a' stands twice"),
        ("[NaN]", "NaN is no JSON number"),
        ("[-Infinity]", "-Infinity is no JSON number"),
        ("[" * 100_000, "nested deeper than 64"),
        ("[" * 65 + "]" * 65, "nested deeper than 64"),
        ("9" * 5_000, "invalid JSON"),
        (b"\xff", "not UTF-8 (byte 0)"),
    ],
    parse_yaml: [
        ("a: [", "invalid YAML"),
        ("a: 1\na: 2", "key 'a' stands twice"),
        ("a: &x [*x]", "an alias that holds itself"),
        ("&x {a: *x}", "an alias that holds itself"),
        (BOMB, "more than 100,000 values"),
        ("[" * 100_000, "nested deeper than 64"),
        ("!!python/object/apply:os.system [touch x]", "invalid YAML"),
        ("? [a]\n: b", "invalid YAML (a list or a group as a key)"),
        ("a: 1\n---\nb: 2", "invalid YAML"),
        ("a: 2024-13-45", "invalid YAML"),
        ("\x00", "invalid YAML"),
        ("!!pairs [a: 1]", "the tag !!pairs is not read"),
        ("x: !!omap [a: 1]", "the tag !!omap is not read"),
        ("- !!set {a}", "the tag !!set is not read"),
        ("!!binary YQ==", "the tag !!binary is not read"),
        ("%TAG ! tag:yaml.org,2002:\n--- !set {a}", "the tag !!set is not read"),
    ],
}


@pytest.mark.parametrize(("parse", "text", "words"), [(parse, *each) for parse in REFUSED for each in REFUSED[parse]])
def test_what_is_refused(parse, text, words):
    with pytest.raises(ValueError, match=r"^place") as error:
        parse(text, "place")
    assert words in str(error.value)
    assert len(str(error.value)) < 400


def test_yaml_that_is_read():
    assert parse_yaml("base: &b {x: 1}\nmore: {<<: *b, y: 2}\nagain: *b", "p") == {
        "base": {"x": 1},
        "more": {"x": 1, "y": 2},
        "again": {"x": 1},
    }
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
        with pytest.raises(ValueError, match=name) as error:
            read_text(tmp_path / name, max_bytes=10)
        assert words in str(error.value)
    with pytest.raises(ValueError, match="not a regular file"):
        read_json(tmp_path)
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
