"""``subtoken-train diagnose`` on a shipped adapter: files, table, and wrong input in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from subtoken_train.cli.main import main
from subtoken_train.datasets.scene_files import write_scenes

ADAPTERS = Path(__file__).resolve().parents[2] / "checkpoints" / "adapters"
ROUTED = str(ADAPTERS / "tiny_fastv25_s16k4")
FILES = ["figure1.png", "figure1a.csv", "figure1b.csv", "groups.csv", "layers.csv", "layers.png"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "scenes"
    write_scenes(folder, train=4, dev=12, test=4)
    return str(folder / "dev.json")


def test_files_and_table(data, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["diagnose", "--adapter", ROUTED, "--data", data, "--limit", "8"]) == 0
    folder = tmp_path / "runs" / "diagnostics" / "tiny_fastv25_s16k4-seed0"
    assert sorted(path.name for path in folder.iterdir()) == FILES
    captured = capsys.readouterr()
    assert "8/8 prompts" in captured.err
    assert "value norm agreement" in captured.out
    assert "the adapter's own is per_token" in captured.out
    layers = (folder / "layers.csv").read_text().splitlines()
    assert [line.split(",")[:3] for line in layers[1:]] == [[str(i), "4", "0.25"] for i in range(6)]
    assert (folder / "figure1b.csv").read_text().splitlines()[1].startswith("0,48,")  # 8 prompts x 6 layers
    assert len((folder / "figure1b.csv").read_text().splitlines()) == 1 + 16
    assert main(["diagnose", "--adapter", ROUTED, "--data", data]) == 2
    assert "tiny_fastv25_s16k4-seed0 exists; choose another --out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--adapter", ROUTED, "--limit", "0"], "--limit 0 must be at least 1"),
        (["--adapter", ROUTED, "--data", "nowhere.json"], "nowhere.json"),
        (["--adapter", "nowhere"], "not an adapter folder"),
        (["--adapter", str(ADAPTERS / "tiny_fastv25_s16k4_anchor")], "a token-only arm routes nothing"),
        (["--adaptr", ROUTED], "Did you mean '--adapter'?"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(data, tmp_path, capsys, argv, words):
    out = tmp_path / "out"
    given = [] if "--data" in argv else ["--data", data]
    assert main(["diagnose", *argv, *given, "--out", str(out)]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("subtoken-train: error:")
    assert words in error
    assert not out.exists()
