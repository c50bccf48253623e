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
from subtoken_train.evaluation.runner.prompt_file import TextPrompts
from tests.support.places import ROOT

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
    assert [record.row["conversations"][0]["value"] for record in read_own_table(path, NO_COLUMNS).records] == [
        f"what is {i} ?" for i in range(5)
    ]
    records = InstructionRecords(path)
    assert [records[i].turns[0].answer for i in range(len(records))] == [f"{i} é" for i in range(5)]
    assert records.image_folder == path.parent
    assert InstructionRecords(path)[4] == records[4]
    source = CorpusSource(str(path), documents="conversations")
    assert [each.text for each in iterate_documents(load_rows(source), source)][4] == "USER: what is 4 ? ASSISTANT: 4 é"


def test_a_changed_file_is_made_anew(tmp_path, cache):
    path = zipped(tmp_path)
    assert len(InstructionRecords(path)) == 5
    zipped(tmp_path, text=LINES * 2)
    assert len(InstructionRecords(path)) == 10


def test_texts_of_arrow_and_gzip_are_documents(tmp_path, cache):
    datasets.Dataset.from_dict({"text": ["one", "two"]}).save_to_disk(tmp_path / "set")
    zipped(tmp_path, text='{"text": "one"}\n{"text": "two"}\n')
    for name in ("set", "t.jsonl.gz"):
        source = CorpusSource(str(tmp_path / name))
        assert [each.text for each in iterate_documents(load_rows(source), source)] == ["one", "two"]


def test_values_come_as_json_would_have_them(tmp_path):
    features = datasets.Features(
        question=datasets.Value("string"), label=datasets.ClassLabel(names=["no", "yes"]), day=datasets.Value("date32")
    )
    rows = {"question": ["a", "b"], "label": [1, 0], "day": [datetime.date(2024, 5, 1), None]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "q.parquet")
    table = read_own_table(tmp_path / "q.parquet", NO_COLUMNS)
    assert [record.row["conversations"][1]["value"] for record in table.records] == ["yes", "no"]
    assert [row["day"] for row in read_rows(tmp_path / "q.parquet")] == ["2024-05-01", None]
    assert table.unread == ("day",)


def test_pictures_inside_a_table_are_refused_with_what_to_do(tmp_path):
    rows = {"image": [{"bytes": b"\x89PNG", "path": None}], "question": ["a"], "answer": ["b"]}
    datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "q.parquet")
    with pytest.raises(ValueError, match=r"column 'image' holds bytes, as of pictures, .*Pictures inside Parquet"):
        read_own_table(tmp_path / "q.parquet", NO_COLUMNS)


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
    assert [record.row["image"] for record in table.records] == [f"images/{i:06d}.png" for i in range(3)]
    assert Image.open("mydata/images/000002.png").getpixel((0, 0)) == (0, 0, 120)


def test_what_cannot_be_read(tmp_path, cache, monkeypatch):
    path = parquet_set(tmp_path)
    (tmp_path / "train-00000-of-00002.parquet").unlink()
    with pytest.raises(ValueError, match=r"is one of 2 files, and train-00000-of-00002.parquet is missing; fetch it"):
        InstructionRecords(path)
    for name in ("a.parquet", "a.arrow", "a.json.gz", "a.csv.gz"):
        (tmp_path / name).write_bytes(b"no such file")
        with pytest.raises(
            ValueError, match=re.escape(str(tmp_path / name)) + r" cannot be (read|unpacked) \(.*; fetch"
        ):
            read_own_table(tmp_path / name, NO_COLUMNS)
    cut = zipped(tmp_path)
    cut.write_bytes(cut.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"t.jsonl.gz cannot be unpacked"):
        InstructionRecords(cut)
    monkeypatch.setattr(row_files, "MAX_UNPACKED", 100)
    with pytest.raises(ValueError, match="has more than 100 bytes once it is unpacked; gunzip -k"):
        InstructionRecords(zipped(tmp_path))
    datasets.DatasetDict(train=datasets.Dataset.from_list(TALKS)).save_to_disk(tmp_path / "splits")
    with pytest.raises(ValueError, match=re.escape(f"name one of its splits: {tmp_path / 'splits/train'}")):
        InstructionRecords(tmp_path / "splits")
    (tmp_path / "q.csv").write_text("question,answer\na,b\n")
    for read in (InstructionRecords, lambda path: load_rows(CorpusSource(str(path)))):
        with pytest.raises(ValueError, match=re.escape(f"subtoken-train init {tmp_path}")):
            read(tmp_path / "q.csv")


TABLES = {
    "record '0' has 'history', [['a', 'b']]: earlier turns are not read": {"history": [["a", "b"]]},
    "record '0' has 'kto_tag', False: a bad answer": {"kto_tag": False},
    "record '0' has 'weight', 0.5: a bad answer, or one that is weighed": {"weight": 0.5},
    "record '0' has 'is_correct', 'false': a bad answer": {"is_correct": "false"},
    "record '0' has 'Skip', '1': a bad answer": {"Skip": "1"},
    "record '0' has 'rejected', 'no': preferences are not trained": {"rejected": "no"},
    "record '0' has 'Audio', 'a.wav': sound is not read": {"Audio": "a.wav"},
    "record '0' has 'tools', '[{}]': tools are not trained": {"tools": "[{}]"},
}


@pytest.mark.parametrize("words", TABLES)
def test_a_column_that_changes_what_is_learnt_is_refused_in_a_table(tmp_path, words):
    path = tmp_path / "q.json"
    good = {"instruction": "a", "input": "", "output": "b"}
    path.write_text(json.dumps([{**good, **TABLES[words]}]))
    with pytest.raises(ValueError, match=re.escape(f"{path}, {words}")):
        read_own_table(path, dict.fromkeys(("image", "question", "answer")))


def test_notes_and_system_texts_of_a_table(tmp_path):
    path = tmp_path / "q.json"
    row = {
        "instruction": "a",
        "output": "b",
        "system": "Be short.",
        "kto_tag": True,
        "weight": 1,
        "history": [],
        "n": 5,
    }
    path.write_text(json.dumps([row, {**row, "system": ""}]))
    table = read_own_table(path, dict.fromkeys(("image", "question", "answer")))
    asked = [[turn["value"] for turn in record.row["conversations"][:-1]] for record in table.records]
    assert asked == [["Be short.", "a"], ["a"]]
    assert table.unread == ("kto_tag", "weight", "history", "n")
    assert table.columns == "question in 'instruction', answer in 'output', before each question in 'system'"
    path.write_text(json.dumps([{"prompt": "a", "chosen": "b", "rejected": "c"}]))
    with pytest.raises(ValueError, match=r"q.json: it is a preference pair, and preferences are not trained"):
        read_own_table(path, dict.fromkeys(("image", "question", "answer")))


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


LIST = json.dumps(TALKS)
BROKEN = [
    ("a.json", '[{"a": 1}\n{"a": 2}]', r"line 2: invalid JSON \(Expecting ',' delimiter\)"),
    ("a.json", '[{"a": 1},\n\n{"a": 2}', r"line 3: invalid JSON \(Expecting ',' delimiter\)"),
    ("a.json", '[{"a": 1},\n]', r"line 2: invalid JSON \(Expecting value\)"),
    ("a.json", '[\n{"id": }]', r"line 2: invalid JSON"),
    ("a.json", '[{"a": 1}]\n[]', r"line 2: invalid JSON \(Extra data\)"),
    ("a.json", '[{"a": "open}]', r"line 1: invalid JSON \(Unterminated string starting at\)"),
    ("a.json", "", r"line 1: invalid JSON \(Expecting value\)"),
    ("a.json", "7", "holds 7; a list of records is needed"),
    ("a.json", "null", "holds null; a list of records"),
    ("a.json", '{"a": 1}', r"holds .*; a list of records is needed; put it in brackets, or name the file .jsonl"),
    ("a.json", LINES, r"line 2: invalid JSON \(Extra data\); use the suffix .jsonl .*, which this is"),
    ("a.json", "[" + "[" * 100_000, "nested too deep"),
    ("a.json", '[{"id": 1, "id": 2}]', "stands twice"),
    ("a.json", '[{"id": ' + "9" * 5000 + "}]", "invalid JSON"),
    ("a.json", r'[{"id": "\ud800"}]', "half of a surrogate pair"),
    ("a.jsonl", '{"id": 1}\n{"id": }', "a.jsonl, line 2: invalid JSON"),
    *(("a.jsonl", text, "is one JSON list, and .jsonl is one record a line; name the file .json") for text in (
        LIST, json.dumps(TALKS, indent=1), f"\ufeff {LIST}", "[" + "[" * 100_000,
    )),
    ("a.jsonl", '{"id": ' + "[" * 100_000, "nested (too deep|deeper)"),
    ("a.jsonl", '{"id": 1, "id": 2}', "stands twice"),
    ("a.jsonl", '{"id": ' + "9" * 5000 + "}", "invalid JSON"),
    ("a.jsonl", r'{"id": "\ud800"}', "half of a surrogate pair"),
]  # fmt: skip


@pytest.mark.parametrize("block", [3, 2**22])
@pytest.mark.parametrize(("name", "text", "message"), BROKEN, ids=range(len(BROKEN)))
def test_what_is_no_json_is_refused(tmp_path, monkeypatch, block, name, text, message):
    monkeypatch.setattr(row_files, "_BLOCK", block)
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        list(scan_records(tmp_path / name))


def test_prompts_that_are_one_list_are_told_so(tmp_path):
    (tmp_path / "p.jsonl").write_text(json.dumps([{"prompt": "a"}], indent=1))
    with pytest.raises(ValueError, match=r"p.jsonl is one JSON list, not one JSON object per line"):
        TextPrompts(source=tmp_path / "p.jsonl").samples()


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
