"""GQA's exact match in both readings."""

import pytest

from subtoken_train.evaluation.metrics.short_answers import ExactMatch, gqa_answer
from tests.support.vqa_cases import mean_of, reference_cases


@pytest.mark.parametrize(
    ("text", "answer", "llava", "lmms"),
    [
        ("Surfing", "surfing", 1, 1),
        ("yes..", "yes", 1, 1),
        ('"woman"', "woman", 0, 1),
        (" yes", "yes", 0, 0),
        ("t shirt", "t-shirt", 0, 0),
        ("tshirt", "t-shirt", 0, 1),
        ("", "no", 0, 0),
    ],
)
def test_what_counts_as_equal(text, answer, llava, lmms):
    assert ExactMatch.figures(text, {"answer": answer}) == {"accuracy": llava, "lmms_exact_match": lmms}


def test_reference_items(shared):
    cases = reference_cases(shared, "gqa")
    assert len(cases) >= 200
    metric = ExactMatch()
    for case in cases:
        assert gqa_answer(case["pred"]) == case["llava_converted"]
        metric.update([case["pred"]], [{"answer": case["target"]}])
        assert ExactMatch.score(case["pred"], {"answer": case["target"]}) == case["llava_gqa_correct"]
    scores = metric.compute()
    assert scores["accuracy"].item() == mean_of([case["llava_gqa_correct"] for case in cases])
    assert scores["lmms_exact_match"].item() == mean_of([case["lmms_exact_match"] for case in cases])
