"""Rows of JSON in any layout and block size, of Parquet, Arrow, gzip and tables; what is broken is named."""

import datetime
import gzip
import json
import re

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from subtoken_train.datasets import row_files
from subtoken_train.datasets.corpus import CorpusSource, iterate_documents, load_rows
from subtoken_train.datasets.question_table import read_own_table
from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.datasets.row_files import read_rows, scan_records
from tests.support.places import ROOT
from tests.support.refusals import refuses

TALKS = [
    {"messages": [{"role": "user", "content": f"what is {i} ?"}, {"role": "assistant", "content": f"{i} é"}]}
    for i in range(5)
]
LINES = "".join(json.dumps(row) + "\n" for row in TALKS)
NO_COLUMNS = dict.fromkeys(("image", "question", "answer"))


def parquet_set(folder):
    for part in range(2):
        name = f"train-{part:05d}-of-00002.parquet"
        datasets.Dataset.from_list(TALKS).shard(2, part, contiguous=True).to_parquet(folder / name)
    return folder / "train-00001-of-00002.parquet"


def saved(folder):
    datasets.Dataset.from_list(TALKS).save_to_disk(folder / "set", num_shards=2)
    return folder / "set"


def zipped(folder, name="t.jsonl.gz", text=LINES):
    (folder / name).write_bytes(gzip.compress(text.encode()))
    return folder / name


KINDS = {
    "a set of Parquet files": parquet_set,
    "save_to_disk's folder": saved,
    "one of its files": lambda folder: saved(folder) / "data-00000-of-00002.arrow",
    "lines in gzip": zipped,
    "a list in gzip": lambda folder: zipped(folder, "t.JSON.gz", json.dumps(TALKS)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_is_read_everywhere(tmp_path, cache, kind):
    path = KINDS[kind](tmp_path)
    assert list(read_rows(path)) == TALKS
    assert [row["conversations"][0]["value"] for _, row in read_own_table(path, NO_COLUMNS).records] == [
        f"what is {i} ?" for i in range(5)
    ]
    records = InstructionRecords(path)
    assert [records[i].turns[0].answer for i in range(len(records))] == [f"{i} é" for i in range(5)]
    assert records.image_folder == path.parent
    assert InstructionRecords(path)[4] == records[4]
    source = CorpusSource(str(path), documents="conversations")
    assert list(iterate_documents(load_rows(source), source))[4] == "USER: what is 4 ? ASSISTANT: 4 é"


def test_texts_of_arrow_and_gzip_are_documents(tmp_path, cache):
    datasets.Dataset.from_dict({"text": ["one", "two"]}).save_to_disk(tmp_path / "set")
    zipped(tmp_path, text='{"text": "one"}\n{"text": "two"}\n')
    for name in ("set", "t.jsonl.gz"):
        source = CorpusSource(str(tmp_path / name))
        assert list(iterate_documents(load_rows(source), source)) == ["one", "two"]


def test_values_come_as_json_would_have_them(tmp_path):
    features = datasets.Features(
        question=datasets.Value("string"), label=datasets.ClassLabel(names=["no", "yes"]), day=datasets.Value("date32")
    )
    rows = {"question": ["a", "b"], "label": [1, 0], "day": [datetime.date(2024, 5, 1), None]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "q.parquet")
    table = read_own_table(tmp_path / "q.parquet", NO_COLUMNS)
    assert [row["conversations"][1]["value"] for _, row in table.records] == ["yes", "no"]
    assert [row["day"] for row in read_rows(tmp_path / "q.parquet")] == ["2024-05-01", None]
    assert table.unread == ("day",)


def test_the_page_writes_pictures_out(tmp_path, cache, monkeypatch):
    monkeypatch.chdir(tmp_path)
    features = datasets.Features({name: datasets.Value("string") for name in ("question", "answer")})
    features["image"] = datasets.Image()
    pictures = [Image.new("RGB", (4, 4), (0, 0, 60 * i)) for i in range(3)]
    rows = {"question": ["a", "b", "c"], "answer": ["1", "2", "3"], "image": pictures}
    datasets.Dataset.from_dict(rows, features=features).to_parquet("table.parquet")
    page = (ROOT / "docs/own_data.md").read_text().partition("### Pictures inside Parquet")[2]
    exec(page.split("```python\n")[1].split("```")[0], {})
    table = read_own_table(tmp_path / "mydata/table.parquet", NO_COLUMNS)
    assert [row["image"] for _, row in table.records] == [f"images/{i:06d}.png" for i in range(3)]
    assert Image.open("mydata/images/000002.png").getpixel((0, 0)) == (0, 0, 120)


def no_parquet(folder):
    parquet_set(folder)
    (folder / "train-00000-of-00002.parquet").unlink()
    return folder / "train-00001-of-00002.parquet"


def cut(folder):
    zipped(folder).write_bytes(zipped(folder).read_bytes()[:-9])
    return folder / "t.jsonl.gz"


def splits(folder):
    datasets.DatasetDict(train=datasets.Dataset.from_list(TALKS)).save_to_disk(folder / "splits")
    return folder / "splits"


def pictures(folder):
    rows = {"image": [{"bytes": b"\x89PNG", "path": None}], "question": ["a"], "answer": ["b"]}
    datasets.Dataset.from_dict(rows).to_parquet(folder / "q.parquet")
    return folder / "q.parquet"


def written(name, content):
    def make(folder):
        (folder / name).write_bytes(content)
        return folder / name

    return make


def table(path):
    return read_own_table(path, NO_COLUMNS)


REFUSED = {
    "is one of 2 files, and train-00000-of-00002.parquet is missing; fetch it": (no_parquet, InstructionRecords),
    **{f"{name} cannot be {word} (": (written(name, b"no such file"), table) for name, word in (
        ("a.parquet", "read"), ("a.arrow", "read"), ("a.json.gz", "unpacked"), ("a.csv.gz", "unpacked"),
    )},
    "t.jsonl.gz cannot be unpacked": (cut, InstructionRecords),
    "more than 600 bytes unpacked; run gunzip -k": (lambda folder: zipped(folder, text=LINES * 2), InstructionRecords),
    "name one of its splits: ": (splits, InstructionRecords),
    "subtoken-train init ": (written("q.csv", b"question,answer"), InstructionRecords),
    "of a table: subtoken-train init ": (
        written("q.csv", b"question,answer"), lambda path: load_rows(CorpusSource(str(path))),
    ),
    "column 'image' holds bytes, as of pictures": (pictures, table),
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_read(tmp_path, cache, monkeypatch, words):
    make, read = REFUSED[words]
    monkeypatch.setattr(row_files, "MAX_UNPACKED", 600)
    refuses(re.escape(words), lambda: read(make(tmp_path)))


TABLES = {
    "record '0' has 'history', [['a', 'b']]: it may change what is learnt": {"history": [["a", "b"]]},
    **{f"record '0' has {name!r}, {value!r}: it may change": {name: value} for name, value in (
        ("kto_tag", False), ("weight", 0.5), ("is_correct", "false"), ("Skip", "1"), ("rejected", "no"), ("tools", "x"),
    )},
}  # fmt: skip


@pytest.mark.parametrize("words", TABLES)
def test_a_column_that_changes_what_is_learnt_is_refused_in_a_table(tmp_path, words):
    path = tmp_path / "q.json"
    path.write_text(json.dumps([{"instruction": "a", "input": "", "output": "b", **TABLES[words]}]))
    refuses(re.escape(f"{path}, {words}"), table, path)


def test_notes_and_system_texts_of_a_table(tmp_path):
    path = tmp_path / "q.json"
    row = {"instruction": "a", "output": "b", "system": "Be short."}
    row |= {"kto_tag": True, "weight": 1, "history": [], "n": 5}
    path.write_text(json.dumps([row, {**row, "system": ""}]))
    found = table(path)
    asked = [[turn["value"] for turn in row["conversations"][:-1]] for _, row in found.records]
    assert asked == [["Be short.", "a"], ["a"]]
    assert found.unread == ("kto_tag", "weight", "history", "n")
    assert found.columns == "question in 'instruction', answer in 'output', before each question in 'system'"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
ROWS = st.lists(st.dictionaries(st.text(max_size=4), VALUES, max_size=2), max_size=5)


@settings(max_examples=40, deadline=None)
@given(ROWS, st.booleans(), st.sampled_from(["a.json", "lines.jsonl", "Lines.JSONL"]), st.sampled_from(["", "\ufeff"]))
def test_lists_and_lines_are_read(tmp_path_factory, rows, ascii_only, name, mark):
    path = tmp_path_factory.getbasetemp() / name
    text = json.dumps(rows, ensure_ascii=ascii_only)
    if name != "a.json":
        text = "\n\n".join(json.dumps(row, ensure_ascii=ascii_only) for row in rows)
    path.write_bytes((mark + text).encode("utf-8", "surrogatepass"))
    assert list(scan_records(path)) == rows


LIST = json.dumps(TALKS)
BROKEN = [
    ("a.json", '[{"a": 1},\n\n{"a": 2}', r"line 3: invalid JSON \(Expecting ',' delimiter\)"),
    ("a.json", '[\n{"id": }]', r"line 2: invalid JSON \(Expecting value\)"),
    ("a.json", '[{"a": 1}]\n[]', r"line 2: invalid JSON \(Extra data\); use the suffix .jsonl for one record a line$"),
    ("a.json", "", "a.json is empty; write a list of records$"),
    ("a.json", "null", "holds null; a list of records is needed$"),
    ("a.json", '{"a": 1}', r"holds .*; a list of records is needed; put it in brackets, or name the file .jsonl"),
    ("a.json", LINES, r"line 2: invalid JSON \(Extra data\); use the suffix .jsonl .*, which this is"),
    ("a.json", "[" + "[" * 100_000, "nested too deep"),
    ("a.json", '[{"id": 1, "id": 2}]', "appears twice"),
    ("a.json", '[{"id": ' + "9" * 5000 + "}]", "invalid JSON"),
    ("a.json", r'[{}, {"text": "\ud800"}]', "record '1' holds half of a surrogate pair"),
    ("a.jsonl", '{"id": 1}\n{"id": }', "a.jsonl, line 2: invalid JSON"),
    *(("a.jsonl", text, "is one JSON list, and .jsonl is one record a line; name the file .json") for text in (
        LIST, json.dumps(TALKS, indent=1), f"\ufeff {LIST}", "[" + "[" * 100_000,
    )),
    ("a.jsonl", '{"id": ' + "[" * 100_000, "nested (too deep|deeper)"),
    ("a.jsonl", '{"id": 1, "id": 2}', "appears twice"),
    ("a.jsonl", '{"id": ' + "9" * 5000 + "}", "invalid JSON"),
    ("a.jsonl", r'{"id": "\ud800"}', "half of a surrogate pair"),
    *((f"a.json{suffix}", text, rf"is not UTF-8 text \(byte {byte}\)") for suffix, text, byte in (
        ("", b'["ab\xff"]', 4), ("", b'["\xe2\x82', 2), ("", b'\xef\xbb\xbf["\xff"]', 5), ("l", b'{}\n"\xff"', 4),
        ("l", b'\xef\xbb\xbf"\xff"', 4),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "message"), BROKEN, ids=range(len(BROKEN)))
def test_what_is_no_json_is_refused(tmp_path, name, text, message):
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    refuses(message, lambda: list(scan_records(tmp_path / name)))
