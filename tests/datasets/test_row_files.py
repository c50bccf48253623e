"""Rows of Parquet, Arrow and gzip are those of JSON; sets of files are read as one; what is broken is named."""

import datetime
import gzip
import json
import re

import datasets
import pytest
from PIL import Image

from subtoken_train.datasets import row_files
from subtoken_train.datasets.corpus import CorpusSource, iterate_documents, load_rows
from subtoken_train.datasets.question_table import read_own_table
from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.datasets.row_files import read_rows
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
        question=datasets.Value("string"),
        label=datasets.ClassLabel(names=["no", "yes"]),
        day=datasets.Value("date32"),
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
