"""Text files, tables and Parquet sets of benchmarks: what is read, what is whole, and every mistake that is worded."""

import base64
import csv
import json
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
from datasets import Dataset, Features, Image, Value
from datasets.exceptions import DatasetNotFoundError
from PIL import Image as Pictures

from subtoken_train.datasets.image_sources import open_image
from subtoken_train.evaluation.tasks import table_files
from subtoken_train.evaluation.tasks.file_rows import (
    benchmark_json,
    find_file,
    read_entries,
    read_jsonl,
    read_lines,
    read_named,
    task_source,
)
from subtoken_train.evaluation.tasks.table_files import read_split, read_table
from subtoken_train.evaluation.tasks.task import Sample
from subtoken_train.evaluation.tasks.whole_set import check_complete, check_samples, missing_shards, open_some
from tests.support.vqa_cases import Birds, picture


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


def some(count):
    return [Sample(str(i), "", {}) for i in range(count)]


def table(shades, image=True):
    content = {"question": [f"shade {shade}?" for shade in shades]}
    features = {"question": Value("string")}
    if image:
        content["image"] = [None if shade is None else {"bytes": picture(shade), "path": None} for shade in shades]
        features["image"] = Image()
    return Dataset.from_dict(content, features=Features(features))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two shards of the default configuration, one of another."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    root = tmp_path / "birds"
    for name, shades in {
        "data/test-00000-of-00002-0123456789abcdef": [1, None],
        "data/test-00001-of-00002-0123456789abcdef": [3],
        "Full/odd-00000-of-00001": [7],
    }.items():
        path = root / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        table(shades).to_parquet(path)
    return root


def test_rows_of_a_folder_come_in_order_and_images_are_read_when_opened(folder):
    rows = read_split(Birds(source=folder), "test", ["question"], ["image"])
    assert [row.values["question"] for row in rows] == ["shade 1?", "shade None?", "shade 3?"]
    assert [row.place.rpartition("/")[2] for row in rows] == [
        "test-00000-of-00002-0123456789abcdef.parquet, row 1",
        "test-00000-of-00002-0123456789abcdef.parquet, row 2",
        "test-00001-of-00002-0123456789abcdef.parquet, row 1",
    ]
    assert rows[1].values["image"] is None
    assert open_image(rows[2].values["image"]).getpixel((0, 0)) == (3, 0, 0)
    assert rows[2].values["image"].read() == picture(3)


def test_a_configuration_is_its_folder_and_may_be_given_itself(folder):
    named = read_split(Birds(source=folder), "odd", ["question"], config="Full")
    itself = read_split(Birds(source=folder / "Full"), "odd", ["question"], config="Full")
    assert [row.values for row in named] == [row.values for row in itself] == [{"question": "shade 7?"}]


def test_plain_binary_columns_are_images_too(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    Dataset.from_dict({"image": [picture(9)]}).to_parquet(tmp_path / "test.parquet")
    (row,) = read_split(Birds(source=tmp_path), "test", [], ["image"])
    assert open_image(row.values["image"]).getpixel((0, 0)) == (9, 0, 0)


def test_an_unreadable_image_names_its_row(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    Dataset.from_dict({"image": [b"no picture"]}).to_parquet(tmp_path / "test.parquet")
    (row,) = read_split(Birds(source=tmp_path), "test", [], ["image"])
    with pytest.raises(ValueError, match=r"test\.parquet, row 1 cannot be read"):
        open_image(row.values["image"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("test", ["answer"]), r"birds \(test\) has no column answer; its columns are question, image"),
        (("test", [], ["picture"]), "has no column picture"),
        (("dev", ["question"]), r"task birds: .*birds has no data/dev-\*\.parquet\. hf download lmms-lab/birds"),
        (("odd", ["question"], [], "Half"), r"has no Half/odd-\*\.parquet"),
    ],
)
def test_what_a_folder_lacks(folder, arguments, message):
    with pytest.raises(ValueError, match=message):
        read_split(Birds(source=folder), *arguments)


def test_a_truncated_shard_is_named(folder):
    shard = next((folder / "data").glob("test-00001*"))
    shard.write_bytes(shard.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"test-00001-of-00002-.*\.parquet is cut off or no Parquet file"):
        read_split(Birds(source=folder), "test", ["question"])


def test_a_partial_set_is_refused_with_the_names_of_the_missing_shards(folder):
    check_complete(Birds(source=folder), some(3), None)
    assert missing_shards(folder) == []
    next((folder / "data").glob("test-00001*")).unlink()
    assert missing_shards(folder) == ["data/test-00001-of-00002.parquet"]
    assert len(read_split(Birds(source=folder), "test", ["question"])) == 2
    with pytest.raises(ValueError, match=r"has 2 of 3 samples in .*Missing: data/test-00001-of-00002\.parquet\. Get"):
        check_complete(Birds(source=folder), some(2), None)
    with pytest.raises(ValueError, match="has 4 of 3 samples in lmms-lab/birds"):
        check_complete(Birds(), some(4), None)


def test_a_task_without_a_number_of_rows_is_never_partial(monkeypatch):
    monkeypatch.setattr(Birds, "rows", None)
    check_complete(Birds(), some(1), None)


class TestSource:
    def test_a_folder_comes_first_and_the_hub_id_is_the_default(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        Path("a/b").mkdir(parents=True)
        assert task_source(Birds(source="a/b")) == Path("a/b")
        assert task_source(Birds(source="a/c")) == "a/c"
        assert task_source(Birds()) == "lmms-lab/birds"

    @pytest.mark.parametrize("source", ["nowhere", "./a/b", Path("a/b"), "a/b/c"])
    def test_what_is_neither(self, source):
        with pytest.raises(ValueError, match=r"neither a folder nor a Hub id \(owner/name\)\. hf download"):
            task_source(Birds(source=source))

    def test_a_task_on_no_hub_needs_a_folder(self, monkeypatch):
        monkeypatch.setattr(Birds, "hub_id", None)
        with pytest.raises(ValueError, match="birds is on no hub: give source"):
            task_source(Birds())

    def test_a_file_by_one_of_its_names(self, tmp_path):
        (tmp_path / "b.json").write_text("{}")
        assert find_file(Birds(), tmp_path, "a.json", "b.json") == tmp_path / "b.json"
        with pytest.raises(ValueError, match=r"task birds: .* has no c\.json or d\.json\. hf download"):
            find_file(Birds(), tmp_path, "c.json", "d.json")


class TestHub:
    @pytest.fixture
    def asked(self, monkeypatch):
        """Only ``lmms-lab-encoder/birds`` is there."""
        calls = []

        def load(name, config, split):
            calls.append(name)
            if name != "lmms-lab-encoder/birds":
                raise DatasetNotFoundError(f"{name} is not on the Hub")
            if split != "test":
                raise ValueError(f"Unknown split {split!r}")
            return table([5])

        monkeypatch.setattr(table_files, "load_dataset", load)
        return calls

    @pytest.mark.parametrize("source", [None, "lmms-lab-encoder/birds"])
    def test_the_renamed_organisation_is_tried(self, asked, source):
        (row,) = read_split(Birds(source=source), "test", ["question"], ["image"])
        assert row.values["question"] == "shade 5?"
        assert row.place == f"{source or 'lmms-lab/birds'} (test), row 1"
        assert row.values["image"].read() == picture(5)
        assert asked == (["lmms-lab-encoder/birds"] if source else ["lmms-lab/birds", "lmms-lab-encoder/birds"])

    @pytest.mark.parametrize(
        ("source", "split", "message"),
        [
            (
                "other/birds",
                "test",
                r"task birds: other/birds cannot be loaded \(other/birds is not on the Hub\)\. hf d",
            ),
            ("lmms-lab/fish", "test", r"lmms-lab/fish cannot be loaded \(lmms-lab/fish is not on the Hub\)"),
            (None, "dev", r"lmms-lab/birds cannot be loaded \(Unknown split 'dev'\)"),
        ],
    )
    def test_a_failed_download_is_one_message(self, asked, source, split, message):
        with pytest.raises(ValueError, match=message):
            read_split(Birds(source=source), split, ["question"])

    def test_no_network_is_not_asked_twice(self, monkeypatch):
        calls = []

        def load(name, config, split):
            calls.append(name)
            raise ConnectionError("no route")

        monkeypatch.setattr(table_files, "load_dataset", load)
        with pytest.raises(ValueError, match=r"cannot be loaded \(no route\)\. hf download"):
            read_split(Birds(), "test", ["question"])
        assert calls == ["lmms-lab/birds"]


def test_damage_within_a_shard_is_worded(folder):
    shard = folder / "data" / "test-00001-of-00002-0123456789abcdef.parquet"
    content = bytearray(shard.read_bytes())
    content[4:60] = bytes(byte ^ 0xFF for byte in content[4:60])
    shard.write_bytes(content)
    with pytest.raises(ValueError, match=r"birds/data cannot be read as Parquet \(.+\); fetch it again"):
        read_split(Birds(source=folder), "test", ["question"])


@pytest.fixture
def two(tmp_path, monkeypatch):
    monkeypatch.setattr(Birds, "rows", 2)
    for name, size in (("a", (3, 2)), ("b", (5, 4))):
        Pictures.new("RGB", size).save(tmp_path / f"{name}.png")
    return [Sample(name, "<image>\nWhat?", {}, (tmp_path / f"{name}.png",)) for name in "ab"]


def test_a_whole_set(two):
    task = Birds()
    check_complete(task, two, None)
    check_samples(task, two)
    assert open_some(two) == [(3, 2), (5, 4)]


def test_a_part_needs_a_limit(two):
    with pytest.raises(ValueError, match=r"task birds has 1 of 2 samples in lmms-lab/birds\..* hf download"):
        check_complete(Birds(), two[:1], None)
    check_complete(Birds(), two[:1], 1)
    check_complete(Birds(), two, 3)
    with pytest.raises(ValueError, match="task birds has 1 of 2 samples"):
        check_complete(Birds(), two[:1], 2)
    with pytest.raises(ValueError, match=r"lmms-lab/birds holds no sample. hf download"):
        check_complete(Birds(), [], 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": "a"}, "task birds, sample 2: id 'a' appears twice, first in task birds, sample 1"),
        ({"prompt": "What?"}, "sample 'b': 0 <image> in the prompt for 1 images"),
        ({"context_characters": 99}, "sample 'b': context_characters 99 lies outside its prompt of 13"),
    ],
)
def test_a_malformed_sample(two, change, message):
    with pytest.raises(ValueError, match=message):
        check_samples(Birds(), [two[0], replace(two[1], **change)])


def test_missing_and_broken_files(two, tmp_path):
    (tmp_path / "b.png").unlink()
    with pytest.raises(ValueError, match=r"task birds: 1 of 2 images are missing \(first: .*b.png\)\. hf download"):
        check_samples(Birds(), two)
    (tmp_path / "b.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"b.png cannot be read"):
        open_some(two)


def test_spread_over_many(two):
    assert len(open_some(two * 50)) == 5
    assert open_some([Sample("t", "text", {})]) == []
