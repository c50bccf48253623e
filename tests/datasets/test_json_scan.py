"""Records found in files of any layout, block size and script, against ``json.loads`` of the whole."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subtoken_train.datasets import row_files
from subtoken_train.datasets.row_files import scan_records

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(VALUES, max_size=6),
    st.booleans(),
    st.sampled_from([None, 1]),
    st.integers(1, 40),
    st.sampled_from(["", " \n"]),
    st.sampled_from(["", "\ufeff"]),
)
def test_a_list_is_found_record_by_record(tmp_path_factory, rows, ascii_only, indent, block, around, mark):
    path = tmp_path_factory.getbasetemp() / "list.json"
    text = mark + around + json.dumps(rows, ensure_ascii=ascii_only, indent=indent) + around
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    before, row_files._BLOCK = row_files._BLOCK, block
    try:
        found = list(scan_records(path))
    finally:
        row_files._BLOCK = before
    assert found == rows


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.dictionaries(st.text(max_size=4), VALUES, max_size=2), max_size=5),
    st.booleans(),
    st.sampled_from(["lines.jsonl", "Lines.JSONL"]),
    st.sampled_from(["", "\ufeff"]),
)
def test_lines_are_found(tmp_path_factory, rows, ascii_only, name, mark):
    path = tmp_path_factory.getbasetemp() / name
    lines = [json.dumps(row, ensure_ascii=ascii_only) for row in rows]
    path.write_bytes((mark + "\n\n".join(lines)).encode("utf-8", "surrogatepass"))
    assert list(scan_records(path)) == rows


@pytest.mark.parametrize("block", [1, 3, 2**22])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"a": 1}\n{"a": 2}]', r"line 2: invalid JSON \(Expecting ',' delimiter\)"),
        ('[{"a": 1},\n\n{"a": 2}', r"line 3: invalid JSON \(Expecting ',' delimiter\)"),
        ('[{"a": 1},\n]', r"line 2: invalid JSON \(Expecting value\)"),
        ('[{"a": 1}]\n[]', r"line 2: invalid JSON \(Extra data\)"),
        ('[{"a": "open}]', r"line 1: invalid JSON \(Unterminated string starting at\)"),
        ("", r"line 1: invalid JSON \(Expecting value\)"),
        ("7", "holds 7; a list of records is needed"),
        ('{"a": 1}\n{"a": 2}', r"line 2: invalid JSON \(Extra data\); use the suffix .jsonl"),
    ],
)
def test_what_is_no_list_is_refused(tmp_path, monkeypatch, block, text, message):
    monkeypatch.setattr(row_files, "_BLOCK", block)
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        list(scan_records(tmp_path / "a.json"))


@pytest.mark.parametrize("block", [1, 2, 2**22])
@pytest.mark.parametrize(
    ("data", "byte"),
    [(b'["ab\xff"]', 4), ('["é'.encode() + b'\xe2\x82"]', 4), (b'["\xe2\x82', 2), (b'\xef\xbb\xbf["\xff"]', 5)],
)
def test_the_first_byte_that_is_not_utf8_is_named(tmp_path, monkeypatch, block, data, byte):
    monkeypatch.setattr(row_files, "_BLOCK", block)
    (tmp_path / "a.json").write_bytes(data)
    with pytest.raises(ValueError, match=rf"is not UTF-8 text \(byte {byte}\)"):
        list(scan_records(tmp_path / "a.json"))
