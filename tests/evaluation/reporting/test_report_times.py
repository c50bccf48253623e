"""Seconds of arms and of methods: Table 6 of the sub-token paper, from the records alone."""

from __future__ import annotations

from subtoken_train.evaluation.reporting.report import make_report
from subtoken_train.evaluation.reporting.sections import sections
from tests.support.report_results import ROWS, answers, facts, register, write_run

SECONDS = ROWS * (0.1 + 0.2)
"""What the records of one run say."""


def time_rows(folder):
    (section,) = [part for part in sections(make_report([folder])) if part.title == "Time"]
    return {row["arm"]: dict(row) for row in section.frame.to_dict("records")}


def test_methods_are_means_over_their_checkpoints(tmp_path, monkeypatch):
    """Two routed arms and one of two seeds of the anchor; the mean is over checkpoints, not over arms."""
    register(monkeypatch, "mmlu", "ruler_4k")
    for task in ("mmlu", "ruler_4k"):
        write_run(tmp_path, facts("full"), task, answers(range(40)))
        for seed in (0, 1):
            write_run(tmp_path, facts(f"quest-seed{seed}", 0.25, reducer="quest 0.25", seed=seed), task, answers([]))
        for keep in ("0.25", "0.125"):
            arm = facts(f"routed{keep}", float(keep), reducer=f"quest {keep}", groups="S8K7 linear")
            write_run(tmp_path, arm, task, answers([]))
    rows = time_rows(tmp_path)
    assert len(rows) == 4 + 3
    backbone = "llava-hf/llava-1.5-7b-hf"
    for method, count in (("no compression", 1), ("Quest", 2), ("Quest + groups", 2)):
        row = rows[f"mean: {method}, {backbone}"]
        assert row["checkpoints"] == str(count)
        assert row["mmlu (s)"] == row["ruler_4k (s)"] == f"{SECONDS:.1f}"
        assert row["total (min)"] == f"{2 * SECONDS / 60:.2f}" == "0.40"
    assert rows["Quest 25 %"]["checkpoints"] == "2"


def test_unequal_numbers_of_samples_have_no_mean(tmp_path, monkeypatch):
    """A limited run says how many samples it timed; beside a whole one no mean is printed."""
    register(monkeypatch, "mmlu")
    write_run(tmp_path, facts("whole", 0.25, reducer="quest 0.25"), "mmlu", answers([]))
    write_run(tmp_path, facts("part", 0.125, reducer="quest 0.125"), "mmlu", answers([])[:10])
    rows = time_rows(tmp_path)
    assert rows["Quest 25 %"]["mmlu (s)"] == f"{SECONDS:.1f}"
    assert rows["Quest 12.5 %"]["mmlu (s)"] == "3.0 (10 samples)"
    mean = rows["mean: Quest, llava-hf/llava-1.5-7b-hf"]
    assert (mean["mmlu (s)"], mean["total (min)"]) == ("-", "-")
