"""The commands that ``init`` prints, pasted: as a newcomer would, in an empty folder, with the embedded models."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from subtoken_train.resources import resource
from tests.support.places import ROOT
from tests.support.run_folders import conversations

pytestmark = pytest.mark.slow


@pytest.fixture
def say(tmp_path):
    """Runs a command line in an empty folder; what it printed."""

    def run(line: str, *more: str) -> str:
        words = [sys.executable, "-m", "subtoken_train", *shlex.split(line)[1:], *more]
        settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            words, cwd=tmp_path, env=os.environ | settings, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
        assert "Traceback" not in done.stderr
        return done.stdout

    return run


def printed(text: str) -> list[str]:
    """The commands below ``what follows``; a prompt may have lines."""
    return text.partition("what follows:\n  ")[2].rstrip().split("\n  subtoken-train ")


def walk(say, folder: str) -> dict[str, str]:
    """What the commands say, each fit for four steps; by the command and a number where there are two."""
    said = {}
    for number, line in enumerate(printed(say(f"subtoken-train init {folder}"))):
        name = line.removeprefix("subtoken-train ").split()[0]
        few = ["--trainer.max_steps=4", "--trainer.val_check_interval=2"] if name == "fit" else []
        said[f"{number} {name}"] = say(f"subtoken-train {line.removeprefix('subtoken-train ')}", *few)
    return said


def test_images(say, tmp_path):
    shutil.copytree(resource("data/samples/mydata"), tmp_path / "mydata")
    said = walk(say, "mydata")
    assert list(said) == ["0 check", "1 fit", "2 fit", "3 evaluate", "4 generate"]
    assert "ready: subtoken-train fit --config mydata_subtoken/mydata.yaml" in said["0 check"]
    assert "expected time: about" in said["0 check"]
    assert "mydata" in said["3 evaluate"]
    assert said["4 generate"].strip()
    for name, routed in (("mydata", True), ("mydata_anchor", False)):
        assert (tmp_path / f"runs/{name}/adapter/router.safetensors").is_file() == routed


def test_conversations(say, tmp_path):
    conversations(tmp_path / "chats/chat.jsonl")
    said = walk(say, "chats")
    assert list(said) == ["0 check", "1 fit", "2 fit", "3 evaluate", "4 generate"]
    assert said["4 generate"].strip()
    assert len(list(Path(tmp_path / "results/chats").rglob("samples-*.jsonl"))) >= 2


def test_texts(say, tmp_path):
    (tmp_path / "texts").mkdir()
    for name in ("memory", "evaluation"):
        shutil.copy(ROOT / f"docs/{name}.md", tmp_path / "texts")
    said = walk(say, "texts")
    assert list(said) == ["0 check", "1 fit", "2 fit", "3 generate"]
    recorded = [json.loads(line) for line in (tmp_path / "texts_subtoken/dev.jsonl").read_text().splitlines()]
    assert all(row["text"].strip() for row in recorded)
