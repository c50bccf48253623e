"""``evaluate`` on tasks, grids and suites, and ``report``: what they print, write and refuse."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from subtoken_train.cli.main import main
from subtoken_train.datasets.scenes import write_scene_split
from subtoken_train.evaluation.reporting.score_tables import PAPER_TASKS
from subtoken_train.evaluation.results import Manifest, read_samples
from subtoken_train.evaluation.runner import spec as suites
from tests.support.commands import refused
from tests.support.eval_runs import ADAPTERS
from tests.support.places import ROOT
from tests.support.report_results import answers, facts, paper_grid, register, write_run

ROUTED = f"{ADAPTERS}/tiny_fastv25_s16k4"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A data root with the scenes below it."""
    folder = tmp_path_factory.mktemp("root")
    write_scene_split(folder / "scenes_gqa", "test", 30, seed=3)
    return folder


def evaluate(*arguments: object) -> int:
    return main(["evaluate", *map(str, arguments)])


def test_tasks_by_name(root, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ("--tasks", "scenes_gqa", "--adapter", ROUTED, "--data-root", root, "--out", out, "--limit", 5)
    assert evaluate(*arguments, "--eviction", "snapkv", "--eviction-keep", "0.5", "--scope", "visual") == 0
    printed = capsys.readouterr().out
    assert "scenes_gqa" in printed
    assert f"subtoken-train report {out}" in printed
    arm, anchor = (Manifest.read(path.parent).arm for path in sorted(out.glob("*/*/manifest.json")))
    assert (arm.eviction, arm.acts) == ("snapkv 0.5", "in and after prefill")
    assert arm.anchor == anchor.name
    assert not anchor.trained
    assert evaluate(*arguments, "--eviction", "snapkv", "--eviction-keep", "0.5", "--scope", "visual") == 0


@pytest.mark.slow
def test_the_mini_suite(tmp_path, monkeypatch):
    monkeypatch.setattr(suites, "SCENES", 40)
    out = tmp_path / "mini"
    assert evaluate("--suite", "mini", "--out", out, "--limit", 2) == 0
    cells = [path.parent.relative_to(out) for path in out.glob("*/*/manifest.json")]
    tasks = {cell.name for cell in cells}
    assert tasks == {"recall", *(f"scenes_{name}" for name in ("pope", "textvqa", "gqa", "mmbench", "caption"))}
    shipped = {path.name for path in (ROOT / ADAPTERS).iterdir()}
    assert {Path(str(Manifest.read(out / cell).arm.adapter)).name for cell in cells} == shipped
    assert all(len(read_samples(out / cell)) == 2 for cell in cells)


@pytest.mark.slow
def test_two_processes_of_torchrun(root, tmp_path):
    """Both answer, the first prints the table, and nobody waits for the other when the work is done."""
    grid = tmp_path / "grid.yaml"
    content = {"out": str(tmp_path / "out"), "tasks": ["scenes_gqa"], "arms": [{"adapter": ROUTED}], "batch_size": 2}
    grid.write_text(json.dumps({**content, "data_root": str(root), "limit": 8, "anchors": "none"}))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", "subtoken_train", "evaluate", "--config", str(grid)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("records are in") == 1
    folder = tmp_path / "out" / "tiny_fastv25_s16k4-seed0" / "scenes_gqa"
    assert sorted(path.name for path in folder.glob("samples-*")) == ["samples-0-of-2.jsonl", "samples-1-of-2.jsonl"]
    assert len(read_samples(folder)) == 8


@pytest.fixture
def results(tmp_path, monkeypatch):
    register(monkeypatch, *PAPER_TASKS)
    folder = tmp_path / "results"
    paper_grid(folder, PAPER_TASKS)
    return folder


def test_chosen_formats_folders_and_seeds(results, tmp_path, capsys):
    other = tmp_path / "other"
    write_run(other, facts("more-seed1", 0.5, seed=1, reducer="fastv 0.5"), "pope", answers(range(9)))
    write_run(other, facts("more-seed2", 0.5, seed=2, reducer="fastv 0.5"), "pope", answers(range(19)))
    out = tmp_path / "out"
    assert main(["report", str(results), str(other), "--out", str(out), "--format", "csv,markdown"]) == 0
    assert sorted(path.name for path in out.iterdir()) == [".written.json", "report.csv", "report.md"]
    (row,) = [line for line in (out / "report.csv").read_text().splitlines() if line.startswith("more,")][:1]
    assert ",1 2,0.500000,0.500000,0.500000,0.600000,,pope,accuracy,fraction,0.350000," in row
    assert "35.00" in capsys.readouterr().out


@pytest.mark.slow
def test_files_that_are_there_stay(results, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "report.csv").write_text("mine")
    command = ["report", str(results), "--out", str(out)]
    assert "report.csv exists; name another file, or pass --overwrite" in refused(capsys, *command)
    assert [path.read_text() for path in out.iterdir()] == ["mine"]
    assert main([*command, "--overwrite"]) == 0
    assert main(command) == 2
    assert main(["report", str(results)]) == 0
    (results / "report" / "report.md").write_text("with my notes")
    assert main(["report", str(results)]) == 2  # an untouched one in its usual place is written anew, not this
    assert (results / "report" / "report.md").read_text() == "with my notes"


def test_an_unknown_format_writes_nothing(results, capsys):
    assert "unknown format 'htm'. Did you mean 'html'?" in refused(capsys, "report", results, "--format", "htm")
    assert not (results / "report").exists()
