"""Tables of measures beside scores: every figure is the records' own, with its paired interval."""

from __future__ import annotations

import numpy as np

from benchmarks.comparison_lists import Comparison, plain_arm
from benchmarks.comparison_tables import comparison_markdown, read_records
from benchmarks.run_records import add_run
from subtoken_train.evaluation.intervals import bootstrap_interval

KINDS = ["read", "describe", "color", "list", "read", "describe"]
DESCRIBED = np.array([kind in ("describe", "list") for kind in KINDS])


def written(folder, arm, seed, measured=True):
    """A record whose figures are drawn by arm and seed."""
    drawn = np.random.default_rng([seed, *arm.encode()])
    content = {
        "arm": arm,
        "seed": seed,
        "kinds": KINDS,
        "data_sha256": "ab",
        "scores": drawn.integers(0, 2, 6).astype(float).tolist(),
        "visual_tokens": "16/64",
        "nominal_kv": 0.25,
        "realised_kv": 0.25,
    }
    if measured:
        digits = [drawn.random() if described else None for described in DESCRIBED]
        content["measures"] = {"digit_f1": digits, "log_likelihood": (-drawn.random(6)).tolist()}
    add_run(folder, content)
    return content


def comparison(*arms):
    return Comparison({arm: plain_arm(arm, arm.upper()) for arm in arms}, (arms[:2],), kinds=())


def test_rows_are_the_records_figures(tmp_path):
    ours = [written(tmp_path, "ours", seed) for seed in (0, 1)]
    theirs = [written(tmp_path, "theirs", seed) for seed in (0, 1, 2)]  # a pair has the seeds of both
    table = comparison_markdown(read_records(tmp_path), comparison("ours", "theirs")).splitlines()
    assert "| arm | group | log-likelihood | digit F1 |" in table
    assert "| difference | seeds | group | score | log-likelihood | digit F1 | by all |" in table

    def of(runs, name, marks):
        return np.array([np.array(run["measures"][name], dtype=float)[marks] for run in runs])

    def words(figures, template):
        mean, low, high = (template.format(figure) for figure in (figures.mean(), *bootstrap_interval(figures)))
        return f"{mean} [{low}, {high}]"

    likelihood, digits = of(theirs, "log_likelihood", DESCRIBED), 100 * of(theirs, "digit_f1", DESCRIBED)
    assert f"| THEIRS | descriptions | {words(likelihood, '{:.3f}')} | {words(digits, '{:.1f}')} |" in table
    assert f"| OURS | questions | {words(of(ours, 'log_likelihood', ~DESCRIBED), '{:.3f}')} | - |" in table
    apart = of(ours, "digit_f1", DESCRIBED) - of(theirs[:2], "digit_f1", DESCRIBED)
    (row,) = [line for line in table if line.startswith("| OURS - THEIRS | 2 | descriptions |")]
    assert row.split(" | ")[5] == words(100 * apart, "{:+.1f}")
    assert row.split(" | ")[6].rstrip(" |") in ("ahead", "behind", "mixed", "level")


def test_a_verdict_follows_all_measures(tmp_path):
    for seed in (0, 1):
        for arm, score in (("ours", 1.0), ("theirs", 0.0)):
            record = written(tmp_path, arm, seed)
            record |= {"scores": [score] * 6, "measures": {"log_likelihood": [-2.0 - score] * 6}}
            add_run(tmp_path, record)
    table = comparison_markdown(read_records(tmp_path), comparison("ours", "theirs"))
    for group in ("questions", "descriptions"):
        cells = "+100.0 [+100.0, +100.0] | -1.000 [-1.000, -1.000] | mixed"
        assert f"| OURS - THEIRS | 2 | {group} | {cells} |" in table


def test_older_records_have_the_older_tables(tmp_path):
    for arm in ("ours", "theirs"):
        written(tmp_path, arm, 0, measured=False)
        written(tmp_path, arm, 1)  # a run of two: the arm has no measure that all hold
    assert "log-likelihood" not in comparison_markdown(read_records(tmp_path), comparison("ours", "theirs"))
    written(tmp_path, "theirs", 0)
    table = comparison_markdown(read_records(tmp_path), comparison("ours", "theirs"))
    assert "| THEIRS | questions |" in table
    assert "| OURS | questions |" not in table
    (row,) = [line for line in table.splitlines() if line.startswith("| OURS - THEIRS |")]
    assert "| difference | seeds | questions | descriptions |" in table
    assert row.count("|") == 5
