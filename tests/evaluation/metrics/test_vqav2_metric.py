"""VQAv2's accuracy in its three readings."""

import pytest

from subtoken_train.evaluation.metrics.vqa_accuracy import VQAv2Accuracy, evalai_answer
from tests.support.vqa_cases import mean_of, reference_cases

READINGS = {
    "official_accuracy": lambda case: case["official_vqaeval_pct"] / 100,
    "llava_accuracy": lambda case: case["official_vqaeval_pct_on_llava_processed"] / 100,
    "lmms_accuracy": lambda case: case["lmms_eval"],
}


def test_ten_equal_answers_are_compared_as_they_are():
    figures = VQAv2Accuracy.figures("Yes", {"answers": ["yes"] * 10})
    assert figures == {"llava_accuracy": 1, "official_accuracy": 0, "lmms_accuracy": 1}
    figures = VQAv2Accuracy.figures("none", {"answers": ["none"] * 10})
    assert figures == {"llava_accuracy": 0, "official_accuracy": 1, "lmms_accuracy": 1}


def test_answers_that_differ_are_normalised():
    people = ["2 dogs", "two dogs", "the two dogs", "Two Dogs."] + ["cat"] * 6
    for name, value in VQAv2Accuracy.figures("Two dogs", {"answers": people}).items():
        assert value == 1, name
    assert VQAv2Accuracy.score("two cats", {"answers": people}) == 0


def test_space_alone_makes_no_difference_between_answers():
    assert VQAv2Accuracy.figures("No", {"answers": ["no"] * 9 + ["no\n"]})["official_accuracy"] == 0


def test_reference(shared):
    cases = reference_cases(shared, "vqav2")
    assert len(cases) >= 300
    metric = VQAv2Accuracy()
    for case in cases:
        assert evalai_answer(case["pred"]) == case["llava_processed_pred"]
        reference = {"answers": case["gt_answers"]}
        figures = VQAv2Accuracy.figures(case["pred"], reference)
        assert figures == {name: pytest.approx(expected(case), abs=1e-6) for name, expected in READINGS.items()}, case
        metric.update([case["pred"]], [reference])
    for name, value in metric.compute().items():
        assert value.item() == mean_of([READINGS[name](case) for case in cases])
