"""ChartQA's relaxed accuracy."""

import pytest

from subtoken_train.evaluation.metrics.short_answers import RelaxedAccuracy, relaxed_match
from tests.support.vqa_cases import reference_cases


@pytest.mark.parametrize(
    ("prediction", "target", "right"),
    [
        ("14", "14", True),
        ("105", "100", True),
        ("95", "100", True),
        ("105.1", "100", False),
        ("-100", "100", False),
        ("5%", "0.05", True),
        ("5", "5%", False),
        ("1,200", "1200", False),
        ("1,200", "1,200", True),
        ("0", "0", True),
        ("0.0", "0", False),
        ("0.0001", "0", False),
        ("No", "no", True),
        ("no.", "no", False),
        ("nan", "100", False),
        ("", "", True),
        ("%", "%", True),
    ],
)
def test_known_answers(prediction, target, right):
    assert relaxed_match(prediction, target) is right


def test_kinds_have_their_own_scores():
    metric = RelaxedAccuracy()
    metric.update(["1", "2"], [{"answer": "1", "kind": "human"}, {"answer": "1", "kind": "human"}])
    assert {name: value.item() for name, value in metric.compute().items()} == {"relaxed_accuracy": 0.5, "human": 0.5}
    metric.update(["7", "8"], [{"answer": "7", "kind": "augmented"}] * 2)
    expected = {"relaxed_accuracy": 0.5, "human": 0.5, "augmented": 0.5}
    assert {name: value.item() for name, value in metric.compute().items()} == expected


def test_reference(shared):
    cases = reference_cases(shared, "chartqa_relaxed")
    assert len(cases) >= 300
    for case in cases:
        assert relaxed_match(case["pred"], case["target"]) is case["lmms_eval"], case
