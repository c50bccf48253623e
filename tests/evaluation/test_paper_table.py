"""From the benchmarks' own files to the paper's tables: one grid per modality, one results folder, one report."""

import csv
from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest

from subtoken_train.cli.main import main
from subtoken_train.datasets.image_sources import open_image
from subtoken_train.evaluation.reporting.exports import markdown_escape as markdown
from subtoken_train.evaluation.tasks import build_task
from subtoken_train.inference import pool
from tests.support import paper_folders as paper
from tests.support.eval_runs import ADAPTERS


@pytest.fixture(scope="module", autouse=True)
def own_dataset_cache(tmp_path_factory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> paper.PaperRun:
    return paper.paper_run(tmp_path_factory.mktemp("paper"))


@pytest.fixture(scope="module")
def report(run, tmp_path_factory) -> Path:
    """The folder with the report in all formats."""
    out = tmp_path_factory.mktemp("report")
    printed = paper.write_printed_tables(tmp_path_factory.mktemp("printed") / "paper_tables.json")
    assert main(["report", str(run.out), "--out", str(out), "--compare-paper", str(printed)]) == 0
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


def printed_rows(report: Path, arm: str, row: str) -> dict[str, dict[str, str]]:
    """What the Markdown report prints of an arm beside a printed row, by column."""
    lines = (report / "report.md").read_text().splitlines()
    start = lines.index("## The paper's printed numbers") + 2
    header, _, *cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start:]]
    rows = [dict(zip(header, each, strict=True)) for each in cells if len(each) == len(header)]
    return {each["score"]: each for each in rows if (each["arm"], each["printed row"]) == (markdown(arm), row)}


def test_printed_numbers_stand_beside_ours(run, report):
    found = printed_rows(report, paper.ROUTED, "Table 1, LLaVA-1.5-7B, FastV25+S16K4")
    assert list(found) == [*paper.COLUMNS.values(), "3-mean", "7-mean", "Δ 3-mean", "Δ 7-mean"]
    printed, counts = ([each[name] for each in found.values()] for name in ("printed", "n"))
    assert printed == [f"{value:.2f}" for value in (*paper.PRINTED.values(), 55, 62.86)] + ["+6.00", "+1.00"]
    assert counts == [str(paper.LIMIT)] * 7 + [str(n * paper.LIMIT) for n in (3, 7, 3, 7)]
    for task, column in paper.COLUMNS.items():
        assert found[column]["ours"].startswith(f"{100 * run.score(paper.ROUTED, task):.2f} ")
    assert printed_rows(report, paper.ANCHOR, "Table 1, LLaVA-1.5-7B, FastV15.625")
    assert printed_rows(report, paper.WHOLE, "Table 1, LLaVA-1.5-7B, LoRA-only")
    found = printed_rows(report, paper.TEXT_ROUTED, "Table 3, LLaMA-2-7B, Quest25+S16K12")
    assert [(name, each["printed"]) for name, each in found.items()] == [("MMLU", "43.00"), ("Δ MMLU", "+2.00")]
    assert found["MMLU"]["ours"].startswith(f"{100 * run.score(paper.TEXT_ROUTED, 'mmlu'):.2f} ")


def test_the_papers_own_tables(run, shared, tmp_path):
    path = shared / "paper_tables.json"
    if not path.is_file():
        pytest.skip("reference material (paper_tables.json) is absent")
    arguments = ["--out", str(tmp_path), "--format", "markdown", "--compare-paper", str(path)]
    assert main(["report", str(run.out), *arguments]) == 0
    mean = printed_rows(tmp_path, paper.ROUTED, "Table 1, LLaVA-1.5-7B, FastV25+S16K4")["3-mean"]
    assert mean["printed"] == "61.67"
    assert printed_rows(tmp_path, paper.TEXT_ANCHOR, "Table 3, LLaMA-2-7B, Quest21.875")["MMLU"]["printed"] == "40.81"
    assert printed_rows(tmp_path, paper.WHOLE, "Table 1, LLaVA-1.5-7B, LoRA-only")


def never(*_: object, **__: object) -> None:
    raise AssertionError("a model was loaded or asked")


@pytest.mark.parametrize("task", paper.FOLDERS)
def test_a_part_of_a_set_needs_a_limit(run, tmp_path, capsys, monkeypatch, task):
    monkeypatch.setattr(pool, "load_family", never)
    arguments = ["--tasks", task, "--adapter", f"{ADAPTERS}/{paper.ROUTED}", "--data-root", str(run.parquet)]
    count = f"{paper.ROWS} of {build_task(task).expected_rows:,}"
    wanted = f"task {task} has {count} samples in {run.parquet / task}. Get the rest"
    assert main(["evaluate", *arguments, "--out", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith(f"subtoken-train: error: {wanted}, or limit the run.")
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
