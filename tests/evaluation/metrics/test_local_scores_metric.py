"""Scores of one's own questions, by rule."""

import pytest

from subtoken_train.evaluation.tasks.local import RULES, LocalScores


@pytest.mark.parametrize(
    ("rule", "prediction", "answers", "expected"),
    [
        ("exact_match", " A Cat. ", ["dog", "a cat"], 1),
        ("exact_match", "a cat!", ["a cat"], 0),
        ("contains", "It is a CAT", ["dog", "cat"], 1),
        ("contains", "it is", ["cat"], 0),
        ("relaxed", "10.4", ["7", "10"], 1),
        ("relaxed", "10.6", ["10"], 0),
        ("anls", "helo", ["hello"], 0.8),
        ("anls", "xyz", ["hello"], 0),
        ("vqa", "two", ["2"] * 3 + ["three"] * 7, (7 * 1 + 3 * 2 / 3) / 10),
    ],
)
def test_rules(rule, prediction, answers, expected):
    reference = {"answers": answers, "metric": rule}
    assert LocalScores.score(prediction, reference) == pytest.approx(expected, abs=1e-9)


def test_means_by_rule():
    metric = LocalScores()
    metric.update(
        ["a", "b", "c"],
        [
            {"answers": ["a"], "metric": "exact_match"},
            {"answers": ["x"], "metric": "exact_match"},
            {"answers": ["c"], "metric": "contains"},
        ],
    )
    found = {name: float(value) for name, value in metric.compute().items()}
    assert found == {"score": pytest.approx(2 / 3), "exact_match": 0.5, "contains": 1}
    assert set(LocalScores.names) == {"score", *RULES}
