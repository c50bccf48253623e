"""``subtoken-train data``: makes the scenes, refuses to lose what is there."""

from __future__ import annotations

import json

from subtoken_train.cli.main import main
from subtoken_train.datasets.english import documents
from tests.support.commands import refused
from tests.support.places import ROOT


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
