"""Text files, tables and Parquet sets of benchmarks: what is read, what is whole, and every mistake that is worded."""

from dataclasses import replace
from pathlib import Path

import pytest
from datasets import Dataset, Features, Image, Value
from datasets.exceptions import DatasetNotFoundError
from PIL import Image as Pictures

from subtoken_train.datasets.image_sources import open_image
from subtoken_train.evaluation.tasks import files
from subtoken_train.evaluation.tasks import files as table_files
from subtoken_train.evaluation.tasks.task import Sample
from tests.support.benchmark_folders import Birds, picture
from tests.support.refusals import refuses, refusing


@pytest.fixture
def write(tmp_path):
    def write(text, name="file.txt"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_lines_and_objects_have_their_places(write):
    path = write('{"a": 1}\n\n{"a": "\u2028x", "b": 2}\n')
    assert [tuple(row) for row in files.read_jsonl(path, ["a"])] == [
        ({"a": 1}, f"{path}, line 1"),
        ({"a": "\u2028x", "b": 2}, f"{path}, line 3"),
    ]
    assert files.read_entries(write('{"17": {"a": 1}}'), None, ["a"]) == [({"a": 1}, f"{path}, '17'")]


def lines(path):
    return files.read_jsonl(path, ["a"])


def cells(path):
    return files.read_table(path, ["a", "b"])


def named(path):
    return files.read_entries(path, None, ["a"])


def entries(path):
    return files.read_entries(path, "rows")


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (lines, '{"a": 1}\n{"a": ', r", line 2: invalid JSON \(.*\); the file may be cut off"),
        (lines, '{"a": 1}\n[1]\n', r", line 2: expected a JSON object, got \[1"),
        (lines, '{"a": 1}\n{"b": 1}\n', r", line 2: no column a; it has b"),
        (lines, b'{"a": 1}\n{"a": "\xff"}\n', r", line 2: not UTF-8"),
        (lines, '{"a": 1}\n{"a": "\0"}\n', r", line 2: holds a NUL character, so it is not text; the file may be"),
        (named, '{"a":\n [1,', r": invalid JSON .*line 2"),
        (named, "7", " has no list of objects"),
        (entries, '{"lines": []}', " has no list rows"),
        (named, '{"17": {"b": 1}}', ", '17': no column a; it has b"),
        *(
            (entries, f'{{"rows": [{{"id": 1}}, {{"{name}": {value}}}]}}', rf", rows\[1\]: {name} is .*; it must be")
            for name, value in [("id", "{}"), ("imageId", "[1]"), ("question_id", "[]"), ("image_id", '{"a": 1}')]
        ),
        (cells, "", " is empty"),
        (cells, "a,c\n1,2\n", ": no column b; it has a, c"),
        (cells, "a,b\n1,2\n3\n", ", line 3: 1 cells, but 2 columns; the file may be cut off"),
        (cells, 'a,b\n1,2\n3,"4', ", line 3: unexpected end of data"),
        (cells, b"a,b\n1,\xff\n", ", line 2: not UTF-8"),
        (cells, "a,b\n1,2\n1,\0\n", ", line 3: holds a NUL character"),
    ],
)
def test_files_that_cannot_be_read(write, tmp_path, read, text, message):
    refuses(rf"file\.txt{message}", read, write(text))
    refuses(r"absent\.txt is missing or cannot be read", read, tmp_path / "absent.txt")


def test_tables_quote_and_break_lines(write):
    path = write('\ufeffa,b\n"x, ""y""\nz",1\n\np,2\n')
    rows = files.read_table(path, ["a"])
    assert [row.values for row in rows] == [{"a": 'x, "y"\nz', "b": "1"}, {"a": "p", "b": "2"}]
    assert [row.place for row in rows] == [f"{path}, line 2", f"{path}, line 5"]
    (row,) = files.read_table(write("x,1\n"), ["a", "b"], header=False)
    assert row.values == {"a": "x", "b": "1"}


def some(count):
    return [Sample(str(i), "", {}) for i in range(count)]


def table(shades):
    content = {
        "question": [f"shade {shade}?" for shade in shades],
        "image": [None if shade is None else {"bytes": picture(shade), "path": None} for shade in shades],
    }
    return Dataset.from_dict(content, features=Features({"question": Value("string"), "image": Image()}))


@pytest.fixture
def folder(tmp_path):
    """Two shards of the default configuration."""
    (tmp_path / "birds/data").mkdir(parents=True)
    for shard, shades in enumerate(([1, None], [3])):
        table(shades).to_parquet(tmp_path / f"birds/data/test-0000{shard}-of-00002-0123456789abcdef.parquet")
    return tmp_path / "birds"


def test_rows_of_a_folder_come_in_order_and_images_are_read_when_opened(folder, tmp_path):
    rows = files.read_split(Birds(source=folder), "test", ["question"], ["image"])
    assert [row.values["question"] for row in rows] == ["shade 1?", "shade None?", "shade 3?"]
    places = [f"test-0000{i}-of-00002-0123456789abcdef.parquet, row {row}" for i, row in ((0, 1), (0, 2), (1, 1))]
    assert [row.place.rpartition("/")[2] for row in rows] == places
    assert rows[1].values["image"] is None
    assert rows[2].values["image"].read() == picture(3)
    Dataset.from_dict({"image": [picture(9), b"no picture"]}).to_parquet(tmp_path / "test.parquet")  # plain bytes
    good, bad = files.read_split(Birds(source=tmp_path), "test", [], ["image"])
    assert open_image(good.values["image"]).getpixel((0, 0)) == (9, 0, 0)
    refuses(r"test\.parquet, row 2 cannot be read", open_image, bad.values["image"])


def test_a_shard_that_describes_itself_wrongly_is_named(folder):
    shard = next((folder / "data").glob("test-00001*"))
    content = bytearray(shard.read_bytes())
    content[4:60] = bytes(byte ^ 0xFF for byte in content[4:60])
    shard.write_bytes(content)
    with pytest.raises(ValueError, match=r"birds/data cannot be read as Parquet \(.+\); fetch it again"):
        files.read_split(Birds(source=folder), "test", ["question"])


def test_a_partial_set_is_refused(folder, monkeypatch):
    files.check_complete(Birds(source=folder), some(3), None)
    next((folder / "data").glob("test-00001*")).unlink()
    assert len(files.read_split(Birds(source=folder), "test", ["question"])) == 2
    with pytest.raises(ValueError, match=r"has 2 of 3 samples in .*birds\. Get the rest, or limit the run\."):
        files.check_complete(Birds(source=folder), some(2), None)
    for count, limit, words in ((4, None, "4 of 3 samples"), (1, 2, "1 of 3"), (0, 1, "no sample")):
        refuses(rf"birds.* {words}.*hf download", files.check_complete, Birds(), some(count), limit)
    files.check_complete(Birds(), some(1), 1)
    monkeypatch.setattr(Birds, "rows", None)
    files.check_complete(Birds(), some(1), None)


def test_a_folder_comes_first_and_the_hub_id_is_the_default(monkeypatch):
    Path("a/b").mkdir(parents=True)
    assert files.task_source(Birds(source="a/b")) == Path("a/b")
    assert files.task_source(Birds(source="a/c")) == "a/c"
    assert files.task_source(Birds()) == "lmms-lab/birds"
    for source in ("nowhere", "./a/d", Path("a/d"), "a/b/c"):
        refuses(r"neither a folder nor a Hub id \(owner/name\)\. hf download", files.task_source, Birds(source=source))
    monkeypatch.setattr(Birds, "hub_id", None)
    refuses("birds is on no hub: give source", files.task_source, Birds())


@pytest.fixture
def asked(monkeypatch):
    """Only ``lmms-lab-encoder/birds`` is there."""
    calls = []

    def load(name, config, split):
        calls.append(name)
        if name == "other/far":
            raise ConnectionError("no route")
        if name != "lmms-lab-encoder/birds":
            raise DatasetNotFoundError(f"{name} is not on the Hub")
        if split != "test":
            raise ValueError(f"Unknown split {split!r}")
        return table([5])

    monkeypatch.setattr(table_files, "load_dataset", load)
    return calls


@pytest.mark.parametrize("source", [None, "lmms-lab-encoder/birds"])
def test_the_renamed_organisation_is_tried(asked, source):
    (row,) = files.read_split(Birds(source=source), "test", ["question"], ["image"])
    assert row.values["question"] == "shade 5?"
    assert row.place == f"{source or 'lmms-lab/birds'} (test), row 1"
    assert row.values["image"].read() == picture(5)
    assert asked == (["lmms-lab-encoder/birds"] if source else ["lmms-lab/birds", "lmms-lab-encoder/birds"])


FAILED = [
    ("other/birds", "test", r"task birds: other/birds .* \(other/birds is not on the Hub\)\. hf d"),
    ("lmms-lab/fish", "test", r"lmms-lab/fish cannot be loaded \(lmms-lab/fish is not on the Hub\)"),
    (None, "dev", r"lmms-lab/birds cannot be loaded \(Unknown split 'dev'\)"),
    ("other/far", "test", r"cannot be loaded \(no route\)\. hf download"),
]


@pytest.mark.parametrize(("source", "split", "message"), FAILED)
def test_a_failed_download_is_one_message(asked, source, split, message):
    refuses(message, files.read_split, Birds(source=source), split, ["question"])
    assert len(asked) == (2 if source in (None, "lmms-lab/fish") else 1)  # no network is not asked twice


@pytest.fixture
def two(tmp_path):
    for name, size in (("a", (3, 2)), ("b", (5, 4))):
        Pictures.new("RGB", size).save(tmp_path / f"{name}.png")
    return [Sample(name, "<image>\nWhat?", {}, (tmp_path / f"{name}.png",)) for name in "ab"]


def test_a_whole_set_is_looked_at_here_and_there(two):
    files.check_samples(Birds(), two)
    assert files.open_some(two) == [(3, 2), (5, 4)]
    assert len(files.open_some(two * 50)) == 5
    assert files.open_some([Sample("t", "text", {})]) == []


MALFORMED = [
    ({"id": "a"}, "task birds, sample 2: id 'a' appears twice, first in task birds, sample 1"),
    ({"prompt": "What?"}, "sample 'b': 0 <image> in the prompt, 1 images"),
    ({"context_characters": 99}, "sample 'b': context_characters 99 must be 0 to 13"),
    ({"images": (Path("c.png"),)}, r"task birds: 1 of 2 images are missing \(first: .*c.png\)\. hf download"),
]
test_a_malformed_sample = refusing(
    MALFORMED, lambda change, two: files.check_samples(Birds(), [two[0], replace(two[1], **change)])
)
