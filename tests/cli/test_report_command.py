"""``subtoken-train report``: files, the terminal's table, and wrong input in one line."""

from __future__ import annotations

import json

import pytest

from subtoken_train.cli.main import main
from subtoken_train.evaluation.reporting.score_tables import PAPER_TASKS
from tests.support.commands import refused
from tests.support.report_results import answers, facts, paper_grid, register, write_run


@pytest.fixture
def results(tmp_path, monkeypatch):
    register(monkeypatch, *PAPER_TASKS)
    folder = tmp_path / "results"
    paper_grid(folder, PAPER_TASKS)
    return folder


@pytest.mark.slow
def test_all_formats_and_the_table(results, capsys):
    assert main(["report", str(results)]) == 0
    files = {".written.json", "report.csv", "report.html", "report.md", "report.tex"}
    assert {path.name for path in (results / "report").iterdir()} == files
    out = capsys.readouterr().out
    assert "+15.00" in out
    assert f"report.md, report.csv, report.tex, report.html written to {results / 'report'}" in out
    first = (results / "report" / "report.html").read_bytes()
    assert main(["report", str(results)]) == 0  # its own folder is no arm, and the same input gives the same page
    assert (results / "report" / "report.html").read_bytes() == first


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


@pytest.mark.slow
def test_flags_and_the_printed_rows(results, tmp_path, capsys):
    write_run(results, facts("late", 0.2, acts="after prefill"), "pope", answers(range(9)), new_tokens=1)
    scores = dict.fromkeys(PAPER_TASKS.values(), 50.0)
    row = {
        "table": "1", "model": "LLaVA-1.5-7B", "method": "FastV25+S16K4", "token_method": "FastV", "total_kv": 15.625,
        "token_keep": 25.0, "S": 16, "K": 4, "variant": "subtoken", "scores": scores,
        "printed_3m": 51.0, "printed_7m": 50.0, "printed_d3": None, "printed_d7": None,
    }  # fmt: skip
    paper = tmp_path / "printed.json"
    paper.write_text(json.dumps({"vlm_rows": [row], "llm_rows": []}))
    assert main(["report", str(results), "--compare-paper", str(paper)]) == 0
    assert "late: compression after prefill cannot change answers" in capsys.readouterr().out
    text = (results / "report" / "report.md").read_text()
    start = r"| fastv25\_s16k4 | Table 1, LLaVA-1.5-7B, FastV25+S16K4 | "
    assert start + "MMBench | 50.00 | - | 75.00 " in text
    assert start + "3-mean | 51.00 | 50.00 | " in text
    paper.write_text(json.dumps({"vlm_rows": [{**row, "S": 8}], "llm_rows": []}))
    assert main(["report", str(results), "--compare-paper", str(paper)]) == 0
    assert "no arm has the backbone, reducer and groups of a row of" in capsys.readouterr().out


def test_wrong_input(results, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "strange", facts("a"), "popes", answers(range(9)))
    for words, message in (
        ((results, "--format", "htm"), "unknown format 'htm'. Did you mean 'html'?"),
        ((tmp_path / "nothing",), "holds no results"),
        ((results, "--compare-paper"), "paper_tables.json does not exist"),
        ((results, "--formats", "csv"), "unknown option '--formats'. Did you mean '--format'?"),
        ((tmp_path / "strange",), "unknown task 'popes'. Did you mean 'pope'?"),
    ):
        assert message in refused(capsys, "report", *words)
    samples = results / "lora_only" / "gqa" / "samples-0-of-1.jsonl"
    samples.write_text("{}\n")
    assert f"{samples}, line 1 is not a record of a sample" in refused(capsys, "report", results)
    assert not (results / "report").exists()
