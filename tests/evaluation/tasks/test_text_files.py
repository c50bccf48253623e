"""JSON, JSON-lines, CSV and TSV: what is read, and messages with file and line."""

import base64
import csv
import json

import pytest

from subtoken_train.evaluation.tasks.file_rows import benchmark_json, read_entries, read_jsonl, read_lines, read_named
from subtoken_train.evaluation.tasks.table_files import read_table


@pytest.fixture
def write(tmp_path):
    def write(text, name="file.txt"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_json_lines_with_their_places(write):
    path = write('{"a": 1}\n\n{"a": "\u2028x", "b": 2}\n')
    rows = read_jsonl(path, ["a"])
    assert [(row.values, row.place) for row in rows] == [
        ({"a": 1}, f"{path}, line 1"),
        ({"a": "\u2028x", "b": 2}, f"{path}, line 3"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1}\n{"a": ', r"file\.txt, line 2: invalid JSON \(.*\); the file may be cut off"),
        ('{"a": 1}\n[1]\n', r"file\.txt, line 2: expected a JSON object, got \[1"),
        ('{"a": 1}\n{"b": 1}\n', r"file\.txt, line 2: no column a; it has b"),
        (b'{"a": 1}\n{"a": "\xff"}\n', r"file\.txt, line 2: not UTF-8"),
        ('{"a": 1}\n{"a": "\0"}\n', r"file\.txt, line 2: holds a NUL character, so it is not text; the file may be"),
    ],
)
def test_bad_json_lines(write, text, message):
    with pytest.raises(ValueError, match=message):
        read_jsonl(write(text), ["a"])


def test_json(write):
    assert benchmark_json(write('{"a": [1]}')) == {"a": [1]}
    with pytest.raises(ValueError, match=r"file\.txt: invalid JSON .*line 2"):
        benchmark_json(write('{"a":\n [1,'))


@pytest.mark.parametrize("read", [benchmark_json, read_jsonl, lambda path: read_table(path, ["a"])])
def test_a_missing_file(tmp_path, read):
    with pytest.raises(ValueError, match=r"absent\.txt is missing or cannot be read"):
        read(tmp_path / "absent.txt")


def test_tables_quote_and_break_lines(write):
    path = write('\ufeffa,b\n"x, ""y""\nz",1\n\np,2\n')
    rows = read_table(path, ["a"])
    assert [row.values for row in rows] == [{"a": 'x, "y"\nz', "b": "1"}, {"a": "p", "b": "2"}]
    assert [row.place for row in rows] == [f"{path}, line 2", f"{path}, line 5"]


def test_a_table_without_header(write):
    (row,) = read_table(write("x,1\n"), ["a", "b"], header=False)
    assert row.values == {"a": "x", "b": "1"}


def test_base64_images_are_read_when_asked_for(write):
    contents = [bytes(range(200)) * 1000, "é".encode() * 30]  # the first is longer than the csv module's own limit
    lines = [f'"{number}\né"\t{base64.b64encode(content).decode()}' for number, content in enumerate(contents)]
    limit = csv.field_size_limit()
    rows = read_table(write("\n".join(["index\timage", *lines])), ["index"], "\t", image="image")
    assert csv.field_size_limit() == limit
    assert [row.values["image"].read() for row in rows] == contents
    assert rows[1].values["index"] == "1\né"
    assert rows[1].values["image"].place == rows[1].place
    assert csv.field_size_limit() == limit


def test_a_cell_that_is_no_image(write):
    (row,) = read_table(write(f"index\timage\n1\t{'?!' * 40}\n"), ["index"], "\t", image="image")
    with pytest.raises(ValueError, match=r"file\.txt, line 2 is not base64 text"):
        row.values["image"].read()


def test_a_cell_too_short_for_an_image_stays_text(write):
    (row,) = read_table(write("index\timage\n1\t17\n"), ["index"], "\t", image="image")
    assert row.values["image"] == "17"


def test_lines_and_named_objects(write):
    path = write("\ufeffa\tb\n\nc")
    assert [tuple(row) for row in read_lines(path)] == [
        ({"text": "a\tb"}, f"{path}, line 1"),
        ({"text": "c"}, f"{path}, line 3"),
    ]
    path = write('{"17": {"a": 1}}')
    assert read_named(path, ["a"]) == {"17": ({"a": 1}, f"{path}, '17'")}
    for text, message in (("[1]", r"holds \[1\] instead"), ('{"17": {"b": 1}}', "'17': no column a; it has b")):
        with pytest.raises(ValueError, match=message):
            read_named(write(text), ["a"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("a,c\n1,2\n", r"file\.txt: no column b; it has a, c"),
        ("a,b\n1,2\n3\n", r"file\.txt, line 3: 1 cells, but 2 columns; the file may be cut off"),
        ('a,b\n1,2\n3,"4', r"file\.txt, line 3: unexpected end of data"),
        (b"a,b\n1,\xff\n", r"file\.txt is not UTF-8"),
    ],
)
def test_bad_tables(write, text, message):
    with pytest.raises(ValueError, match=message):
        read_table(write(text), ["a", "b"])


@pytest.mark.parametrize(("name", "value"), [("id", {}), ("imageId", [1]), ("question_id", []), ("image_id", {"a": 1})])
def test_names_that_are_none(tmp_path, name, value):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"rows": [{"id": 1}, {name: value}]}))
    with pytest.raises(ValueError, match=rf"a\.json, rows\[1\]: {name} is .*; it must be a text"):
        read_entries(path, "rows")
