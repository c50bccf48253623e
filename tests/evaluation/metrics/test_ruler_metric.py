"""RULER's string match: both programs' figures, and the mean over tasks."""

import json

import pytest
import torch

from subtoken_train.evaluation.metrics.ruler import RulerMatch, ruler_score


@pytest.fixture
def golden(shared):
    lines = (shared / "golden_eval" / "ruler" / "set_a.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_items_of_the_golden(golden):
    items = [row for row in golden if row["kind"] == "item"]
    assert len(items) == 270
    for row in items:
        given = row["predicted_answer"], row["task"], row["answer"]
        assert round(100 * ruler_score(*given), 2) == pytest.approx(row["ruler_score"], abs=1e-6)
        assert round(100 * ruler_score(*given, control=""), 2) == pytest.approx(row["kvpress_score"], abs=1e-6)


def test_aggregate_of_the_golden(golden):
    *items, aggregate = golden
    metric = RulerMatch()
    metric.update(
        [row["predicted_answer"] for row in items],
        [{"task": row["task"], "answers": row["answer"]} for row in items],
    )
    scores = {name: float(value) for name, value in metric.compute().items()}
    tasks = aggregate["ruler"]
    assert {name: round(100 * scores[name], 2) for name in tasks} == tasks
    assert scores.keys() == {"string_match", "kvpress_string_match", *tasks}
    mean = sum(scores[name] for name in tasks) / len(tasks)
    assert scores["string_match"] == pytest.approx(mean, abs=1e-12)


def test_control_characters_differ():
    assert ruler_score("ab\ncd", "qa_1", ["abcd"]) == 0
    assert ruler_score("ab\ncd", "qa_1", ["abcd"], control="") == 1


def test_all_and_part():
    assert ruler_score("ALPHA only", "vt", ["alpha", "beta"]) == 0.5
    assert ruler_score("ALPHA only", "qa_2", ["alpha", "beta"]) == 1


def test_tasks_weigh_alike_whatever_their_size():
    metric = RulerMatch()
    metric.update(["1", "2", "x"], [{"task": "vt", "answers": ["1"]}] * 2 + [{"task": "qa_1", "answers": ["x"]}])
    assert metric.compute()["string_match"] == torch.tensor(0.75, dtype=torch.float64)
