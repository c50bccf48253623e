"""``subtoken-train data``: makes the scenes, refuses to lose what is there."""

from __future__ import annotations

import json

import datasets
import pytest

from subtoken_train.cli import data
from subtoken_train.cli.main import main
from subtoken_train.datasets.corpus import CorpusSource, load_rows
from subtoken_train.datasets.english import documents
from tests.support.commands import refused
from tests.support.places import ROOT
from tests.support.sampling import sampled


def scenes(folder, *extra: str) -> list[str]:
    return ["data", "scenes", "--out", str(folder), "--train", "6", "--dev", "4", "--test", "5", *extra]


def test_writes_three_splits(tmp_path, capsys):
    folder = tmp_path / "scenes"
    assert main(scenes(folder)) == 0
    assert str(folder) in capsys.readouterr().out
    counts = {split: len(json.loads((folder / f"{split}.json").read_text())) for split in ("train", "dev", "test")}
    assert counts == {"train": 6, "dev": 4, "test": 5}


def test_existing_folder_needs_overwrite(tmp_path, capsys):
    folder = tmp_path / "scenes"
    assert main(scenes(folder)) == 0
    before = (folder / "train.json").read_bytes()
    assert "overwrite" in refused(capsys, *scenes(folder, "--seed", "1"))
    assert (folder / "train.json").read_bytes() == before
    assert main(scenes(folder, "--seed", "1", "--overwrite")) == 0
    assert (folder / "train.json").read_bytes() != before


def test_english_documents(tmp_path, capsys):
    folder = tmp_path / "english"
    command = ["data", "english", "--out", str(folder)]
    assert main(command) == 0
    lines = (folder / "dev.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == documents("dev")
    assert "exists; choose another folder or pass --overwrite" in refused(capsys, *command)
    assert main([*command, "--overwrite"]) == 0
    (folder / "train.jsonl.bak").write_text("mine")
    assert "train.jsonl.bak" in refused(capsys, *command, "--overwrite")


def test_samples_are_those_of_a_checkout(tmp_path, monkeypatch, capsys):
    """In an empty folder, where an installed package is asked as a checkout would be."""
    monkeypatch.chdir(tmp_path)
    ask = ["generate", "--adapter", "checkpoints/adapters/tiny_lora_only", "--prompt", "is there a 7 ?"]
    words = refused(capsys, *ask, "--image", "data/samples/a.png")
    assert words.endswith("image data/samples/a.png does not exist; get it: subtoken-train data samples")
    assert "get it: subtoken-train data samples" in refused(capsys, "init", "data/samples/mydata")
    assert main(["data", "samples"]) == 0
    shipped, made = ROOT / "data/samples", tmp_path / "data/samples"
    names = [path.relative_to(shipped) for path in shipped.rglob("*") if path.is_file()]
    assert len(names) > 30
    assert all((made / name).read_bytes() == (shipped / name).read_bytes() for name in names)
    assert "exists; choose another folder or pass --overwrite" in refused(capsys, "data", "samples")
    assert main(["data", "samples", "--overwrite"]) == 0
    (made / "mydata/mine.csv").touch()
    assert "mydata/mine.csv" in refused(capsys, "data", "samples", "--overwrite")


def test_a_seed_that_is_none(tmp_path, capsys):
    assert "--seed is -1; it must be 0 to" in refused(capsys, *scenes(tmp_path / "made", "--seed", "-1"))


PARTS = ("coco/train2017/1.jpg", "gqa/images/2.jpg", "ocr_vqa/images/3.jpg", "vg/VG_100K/4.jpg", "vg/VG_100K_2/5.jpg")


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Six records, one of them text only, whose five images are there (one as .gif)."""
    monkeypatch.setattr(data, "MIX665K_RECORDS", 6)
    rows = [
        {"id": i, "image": name, "conversations": [talk("<image> hi"), talk("yes", "gpt")]}
        for i, name in enumerate(PARTS)
    ]
    rows.append({"id": "text", "model": "", "conversations": [talk("hi"), talk("yes", "gpt")]})
    (tmp_path / data.MIX665K).write_text(json.dumps(rows))
    for name in PARTS:
        path = tmp_path / "images" / name.replace("3.jpg", "3.gif")
        path.parent.mkdir(parents=True)
        path.touch()
    return tmp_path


def talk(value, role="human"):
    return {"from": role, "value": value}


def failed(capsys, argv):
    """A check that must fail: what it prints, and its one line of stderr."""
    assert main(["data", *argv]) == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1
    return out, err


def files_below(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_complete_set(root, capsys):
    before = files_below(root)
    assert main(["data", "llava665k", "--root", str(root)]) == 0
    out = capsys.readouterr().out
    assert "train2017.zip" in out
    assert f"{root / data.MIX665K}: 6 records, 1 without an image" in out
    assert "coco/train2017          1 named, all there\n" in out
    assert "ocr_vqa/images          1 named, all there, 1 under another suffix\n" in out
    assert out.endswith("complete: 6 records, 5 images\n")
    assert files_below(root) == before


def test_missing_images_are_counted_listed_and_written_on_request(root, capsys, tmp_path):
    for name in ("coco/train2017/1.jpg", "vg/VG_100K/4.jpg"):
        (root / "images" / name).unlink()
    (root / "images/vg/VG_100K").rmdir()
    before = files_below(root)
    out, err = failed(capsys, ["llava665k", "--root", str(root)])
    assert "1 named, 1 missing\n    coco/train2017/1.jpg\n" in out
    assert "2 of 5 images" in err
    assert files_below(root) == before
    failed(capsys, ["llava665k", "--root", str(root), "--missing-list", str(tmp_path / "list.txt")])
    assert (tmp_path / "list.txt").read_text() == "coco/train2017/1.jpg\nvg/VG_100K/4.jpg\n"
    (tmp_path / "list.txt").write_text("mine")
    again = ["llava665k", "--root", str(root), "--missing-list", str(tmp_path / "list.txt")]
    assert "list.txt exists" in failed(capsys, again)[1]
    assert (tmp_path / "list.txt").read_text() == "mine"
    failed(capsys, [*again, "--overwrite"])
    assert (tmp_path / "list.txt").read_text() == "coco/train2017/1.jpg\nvg/VG_100K/4.jpg\n"


def test_another_number_of_records(root, capsys, monkeypatch):
    monkeypatch.setattr(data, "MIX665K_RECORDS", 665_298)
    _, err = failed(capsys, ["llava665k", "--root", str(root)])
    assert "holds 6 records, not the 665,298 of LLaVA-v1.5's mix665k; fetch it again" in err


def test_without_the_records_the_sources_are_said(tmp_path, capsys):
    out, err = failed(capsys, ["llava665k", "--root", str(tmp_path)])
    assert "hf download liuhaotian/LLaVA-Instruct-150K" in out
    assert "does not exist" in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["llava665k"], "data llava665k needs the folder to check: --root PATH"),
        (["images", "--root", "."], "data images needs the data file that names the images: --file PATH"),
        (["wikitext103", "--root", ".", "--file", "x"], "--file does not apply to data wikitext103; leave it out"),
        (["scenes", "--missing-list", "x"], "--missing-list does not apply to data scenes"),
    ],
)
def test_options_that_do_not_fit(capsys, argv, message):
    assert message in failed(capsys, argv)[1]


@pytest.fixture
def wikitext(tmp_path, monkeypatch):
    """A small set laid out as the public one."""
    monkeypatch.setattr(data, "WIKITEXT_ROWS", {"train": 6, "validation": 1, "test": 1})
    folder = tmp_path / data.WIKITEXT
    folder.mkdir()
    lines = [" = A title = \n", " words \n", "\n"]
    for name, rows in (("train-00000-of-00002", lines), ("train-00001-of-00002", lines)):
        datasets.Dataset.from_dict({"text": rows}).to_parquet(folder / f"{name}.parquet")
    for split in ("validation", "test"):
        datasets.Dataset.from_dict({"text": [" words \n"]}).to_parquet(folder / f"{split}-00000-of-00001.parquet")
    return tmp_path


def test_wikitext(wikitext, capsys):
    assert main(["data", "wikitext103", "--root", str(wikitext)]) == 0
    out = capsys.readouterr().out
    assert "train               6 rows in 2 files\n" in out
    assert f"train: {{name: {wikitext / data.WIKITEXT}, documents: wikitext}}" in out


@sampled("streaming", [False, True], every=2)
def test_its_folder_is_a_corpus(wikitext, tmp_path, monkeypatch, streaming):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = str(wikitext / data.WIKITEXT)
    train = load_rows(CorpusSource(folder, documents="wikitext"), streaming)
    assert len(list(train)) == 6
    assert len(list(load_rows(CorpusSource(folder, split="validation"), streaming))) == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train-00001-of-00002", None, "has 1 of 2 files of the split train; fetch it: hf download"),
        ("test-00000-of-00001", None, "has 0 of 1 files of the split test"),
        ("test-00000-of-00001", b"no parquet", "cannot be read as Parquet"),
    ],
)
def test_wikitext_with_something_missing(wikitext, capsys, name, content, message):
    path = wikitext / data.WIKITEXT / f"{name}.parquet"
    path.unlink()
    if content:
        path.write_bytes(content)
    assert message in failed(capsys, ["wikitext103", "--root", str(wikitext)])[1]


def test_wikitext_with_other_rows(wikitext, capsys, monkeypatch):
    monkeypatch.setattr(data, "WIKITEXT_ROWS", {"train": 1_801_350})
    _, err = failed(capsys, ["wikitext103", "--root", str(wikitext)])
    assert "split train: 6 rows, not 1,801,350; fetch it again" in err
