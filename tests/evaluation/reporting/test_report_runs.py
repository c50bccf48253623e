"""What is read from results folders, and every way in which they can be wrong."""

from __future__ import annotations

import pytest

from subtoken_train.evaluation.reporting.runs import read_results
from tests.support.report_results import answers, facts, register, write_run


@pytest.fixture(autouse=True)
def tasks(monkeypatch):
    register(monkeypatch, "pope", "gqa")


def test_scores_are_computed_anew(tmp_path):
    place = write_run(tmp_path, facts("a"), "pope", answers(range(30)))
    (place / "scores.json").write_text('{"accuracy": 0.99}')
    (arm,) = read_results([tmp_path])
    run = arm.runs["pope"][None]
    assert run.scores["accuracy"] == pytest.approx(0.75)
    assert run.samples.score.sum() == 30  # the records say 0.123 each
    assert len(run.samples) == run.manifest.rows
    assert run.is_mean
    assert run.cost.shares["with_index"] == 1
    assert run.cost.shares["prompt"] == 1
    assert not run.cost.acted


def test_cost_of_a_compressed_arm(tmp_path):
    write_run(tmp_path, facts("a", 0.25), "pope", answers(range(30)), overhead=80)
    cost = read_results([tmp_path])[0].runs["pope"][None].cost
    assert cost.shares["with_index"] == (8_000 + 80) / 32_000
    assert cost.shares["prompt"] == (8_000 + 8_080) / 40_000
    assert cost.shares["entries"] == 0.25
    assert cost.acted


def test_an_arm_spread_over_folders(tmp_path):
    write_run(tmp_path / "one", facts("a-seed0", seed=0), "pope", answers(range(30)))
    write_run(tmp_path / "two", facts("a-seed1", seed=1, adapter="elsewhere"), "pope", answers(range(20)))
    write_run(tmp_path / "two", facts("a-seed0", seed=0), "gqa", answers(range(10)))
    (arm,) = read_results([tmp_path / "one", tmp_path / "two"])
    assert arm.name == "a"
    assert {task: list(runs) for task, runs in arm.runs.items()} == {"pope": [0, 1], "gqa": [0]}


def refused(*folders) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the caller reads the message
        read_results(list(folders))
    return str(error.value)


def test_no_results(tmp_path):
    assert "holds no results (ARM/TASK/manifest.json" in refused(tmp_path)
    assert "holds no results" in refused(tmp_path / "absent")


@pytest.mark.parametrize(
    ("task", "given", "key", "words"),
    [
        ("poppe", {}, "answer", "poppe/manifest.json: unknown task 'poppe'. Did you mean 'pope'?"),
        ("pope", {"rows": 39}, "answer", "holds 40 samples, but its manifest says 39"),
        ("pope", {"primary": "acuracy"}, "answer", "unknown score 'acuracy'. Did you mean 'accuracy'?"),
        ("pope", {}, "other", "its references and predictions cannot be scored (not of the form"),
    ],
)
def test_a_run_that_cannot_be_scored(tmp_path, task, given, key, words):
    path = write_run(tmp_path, facts("a"), task, answers(range(3)), **given) / "samples-0-of-1.jsonl"
    path.write_text(path.read_text().replace('"answer"', f'"{key}"'))
    assert words in refused(tmp_path)


def test_a_torn_last_line_is_an_incomplete_run(tmp_path):
    place = write_run(tmp_path, facts("a"), "pope", answers(range(3)))
    path = place / "samples-0-of-1.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    run = read_results([tmp_path])[0].runs["pope"][None]
    assert len(run.samples) == 39
    assert len(run.samples) < run.manifest.rows


def test_runs_that_do_not_belong_together(tmp_path):
    write_run(tmp_path / "one", facts("a", seed=0), "pope", answers(range(3)))
    write_run(tmp_path / "two", facts("a", seed=1), "pope", answers(range(3)), digest="other")
    assert "arm a answered different samples of pope in" in refused(tmp_path / "one", tmp_path / "two")
    write_run(tmp_path / "three", facts("a", seed=0), "pope", answers(range(3)))
    assert "arm a, seed 0 appears twice on pope" in refused(tmp_path / "one", tmp_path / "three")
    write_run(tmp_path / "four", facts("a", 0.5, seed=3), "pope", answers(range(3)))
    assert "arm a has acts in prefill, but - elsewhere" in refused(tmp_path / "one", tmp_path / "four")
    write_run(tmp_path / "five", facts("a", seed=4, anchor="b"), "pope", answers(range(3)))
    assert "arm a names anchor b, but None elsewhere" in refused(tmp_path / "one", tmp_path / "five")
