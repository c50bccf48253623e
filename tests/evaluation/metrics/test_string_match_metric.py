"""RULER's string match: both programs' figures, and the mean over tasks."""

import pytest

from subtoken_train.evaluation.metrics.string_match import RulerMatch, ruler_score
from tests.support.vqa_cases import reference_cases


@pytest.fixture
def golden(shared):
    """Sets of items, each with its aggregate."""
    sets = [[]]
    for case in reference_cases(shared, "ruler"):
        sets[-1].append(case)
        if case["kind"] == "aggregate":
            sets.append([])
    assert not sets.pop()
    return sets


def test_items_of_the_golden(golden):
    items = [row for *rows, _ in golden for row in rows]
    assert items
    for row in items:
        given = row["predicted_answer"], row["task"], row["answer"]
        assert round(100 * ruler_score(*given), 2) == pytest.approx(row["ruler_score"], abs=1e-6)
        assert round(100 * ruler_score(*given, control=""), 2) == pytest.approx(row["kvpress_score"], abs=1e-6)


def test_aggregate_of_the_golden(golden):
    for *items, aggregate in golden:
        metric = RulerMatch()
        metric.update(
            [row["predicted_answer"] for row in items],
            [{"task": row["task"], "answers": row["answer"]} for row in items],
        )
        scores = metric.compute()
        tasks = aggregate["ruler"]
        assert {name: round(100 * scores[name], 2) for name in tasks} == tasks
        assert scores.keys() == {"string_match", "kvpress_string_match", *tasks}
        kvpress = [own["string_match"] for own in aggregate["kvpress"].values()]
        assert 100 * scores["kvpress_string_match"] == pytest.approx(sum(kvpress) / len(kvpress), abs=0.005)
        mean = sum(scores[name] for name in tasks) / len(tasks)
        assert scores["string_match"] == pytest.approx(mean, abs=1e-12)


def test_parts_and_control_characters():
    assert ruler_score("ALPHA only", "vt", ["alpha", "beta"]) == 0.5
    assert ruler_score("ALPHA only", "qa_2", ["alpha", "beta"]) == 1
    assert ruler_score("ab\ncd", "qa_1", ["abcd"]) == 0
    assert ruler_score("ab\ncd", "qa_1", ["abcd"], control="") == 1


def test_tasks_weigh_alike_whatever_their_size():
    metric = RulerMatch()
    metric.update(["1", "2", "x"], [{"task": "vt", "answers": ["1"]}] * 2 + [{"task": "qa_1", "answers": ["x"]}])
    assert metric.compute()["string_match"] == 0.75
