"""Scenes are found where ``subtoken-train data scenes`` writes them, and a mistake leaves no folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from subtoken_train.cli.main import main
from subtoken_train.datasets.scene_files import write_scenes
from subtoken_train.evaluation.results import Manifest
from subtoken_train.resources import resource

ADAPTER = str(resource("checkpoints/adapters/tiny_lora_only"))


@pytest.mark.slow
def test_scenes_are_read_where_they_were_made(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    argv = ["evaluate", "--adapter", ADAPTER, "--tasks", "scenes_pope", "--limit", "2", "--out", "results/x"]
    assert main(argv) == 2
    assert "data/scenes is read unless a folder is named: subtoken-train data scenes" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    write_scenes("data/scenes", train=1, dev=1, test=10)
    assert main(argv) == 0, capsys.readouterr().err
    (folder,) = Path("results/x").glob("*/scenes_pope")
    assert Manifest.read(folder).source == "data/scenes"


def test_a_device_that_is_not_there_leaves_no_suite(tmp_path, capsys):
    out = tmp_path / "mini"
    assert main(["evaluate", "--suite", "mini", "--device", "cuda:77", "--out", str(out)]) == 2
    assert "unknown device of this machine 'cuda:77'" in capsys.readouterr().err
    assert not out.exists()


def test_a_split_has_records(tmp_path, capsys):
    assert main(["data", "scenes", "--out", str(tmp_path / "scenes"), "--dev", "0"]) == 2
    assert "--dev 0 must be at least 1" in capsys.readouterr().err
    assert not (tmp_path / "scenes").exists()
