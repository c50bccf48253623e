"""From the benchmarks' own files to the paper's tables: one grid per modality, one results folder, one report."""

import csv
from pathlib import Path

import pytest

from subtoken_train.cli.main import main
from subtoken_train.datasets.image_sources import open_image
from subtoken_train.evaluation.tasks import build_task
from subtoken_train.inference import pool
from tests.support import paper_folders as paper
from tests.support.commands import refused
from tests.support.eval_runs import ADAPTERS


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> paper.PaperRun:
    return paper.paper_run(tmp_path_factory.mktemp("paper"))


@pytest.fixture(scope="module")
def report(run, tmp_path_factory) -> Path:
    """The folder with the report in all formats."""
    out = tmp_path_factory.mktemp("report")
    assert main(["report", str(run.out), "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def rows(report) -> dict[tuple[str, str, str], dict[str, str]]:
    """The CSV's rows by arm, task and score."""
    with (report / "report.csv").open(newline="") as file:
        return {(row["arm"], row["task"], row["score"]): row for row in csv.DictReader(file)}


def primary(rows, arm: str, task: str) -> dict[str, str]:
    return rows[arm, task, {"vqav2": "llava_accuracy"}.get(task, "mean" if task in paper.MEANS else "accuracy")]


def test_the_three_arms_stand_at_the_papers_budget(rows):
    texts = paper.TEXT_ROUTED, paper.TEXT_ANCHOR
    budgets = {paper.WHOLE: 1, paper.ANCHOR: 0.15625, paper.ROUTED: 0.15625, **dict.fromkeys(texts, 0.21875)}
    for arm, nominal in budgets.items():
        mine = [row for (name, *_), row in rows.items() if name == arm]
        assert {float(row["kv_nominal"]) for row in mine} == {nominal}
        if arm not in texts:  # pages are whole, and nominal budgets are of 1,024 tokens
            assert {float(row["kv_measured"]) for row in mine} == {nominal}


def test_columns_and_means_are_those_of_the_records(run, rows):
    for arm in paper.IMAGE_ARMS:
        for task in paper.COLUMNS:
            row, mark = primary(rows, arm, task), f"partial: {paper.LIMIT} of {build_task(task).expected_rows:,}"
            assert float(row["value"]) == pytest.approx(run.score(arm, task), abs=2e-6)
            assert (row["n"], row["unit"]) == (str(paper.LIMIT), "fraction")
            assert mark in row["marks"]
            assert mark in primary(rows, arm, "7-mean")["marks"]
        for mean, tasks in paper.MEANS.items():
            row = primary(rows, arm, mean)
            assert float(row["value"]) == pytest.approx(run.mean(arm, tasks), abs=2e-6)
            assert row["n"] == str(paper.LIMIT * len(tasks))
    assert len({primary(rows, arm, "7-mean")["value"] for arm in paper.IMAGE_ARMS}) > 1
    for arm in paper.TEXT_ARMS:
        assert float(primary(rows, arm, "mmlu")["value"]) == pytest.approx(run.score(arm, "mmlu"), abs=2e-6)


@pytest.mark.parametrize("task", paper.FOLDERS)
def test_a_part_of_a_set_needs_a_limit(run, tmp_path, capsys, monkeypatch, task):
    monkeypatch.setattr(pool, "load_family", None)  # so that no model can be loaded
    arguments = ["--tasks", task, "--adapter", f"{ADAPTERS}/{paper.ROUTED}", "--data-root", str(run.parquet)]
    count = f"{paper.ROWS} of {build_task(task).expected_rows:,}"
    wanted = f"task {task} has {count} samples in {run.parquet / task}. Get the rest"
    said = refused(capsys, "evaluate", *arguments, "--out", str(tmp_path / "out"))
    assert said.startswith(f"{wanted}, or limit the run.")
    assert not list(tmp_path.glob("out/*/*"))


@pytest.mark.parametrize("task", sorted(paper.FOLDERS.keys() - {"gqa", "mmbench", "mme", "scienceqa", "vqav2"}))
def test_both_layouts_ask_the_same(run, tmp_path, task):
    paper.FOLDERS[task](tmp_path, True)
    hub, own = (build_task(task, folder).samples() for folder in (run.parquet / task, tmp_path))
    assert len(hub) == len(own) == paper.ROWS
    for first, second in zip(hub, own, strict=True):
        assert (first.prompt, first.choices, first.kind) == (second.prompt, second.choices, second.kind)
        assert first.reference == second.reference
        for images in zip(first.images, second.images, strict=True):
            left, right = map(open_image, images)
            assert left.tobytes() == right.tobytes()
