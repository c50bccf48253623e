"""Soft accuracy over people's answers, beside the plain sum over left-out people."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.evaluation.metrics.vqa_accuracy import SoftAccuracy, evalai_answer, leave_one_out
from tests.support.vqa_cases import mean_of, reference_cases


def left_out_one_by_one(answer, people):
    terms = [min(1, sum(other == answer for j, other in enumerate(people) if j != i) / 3) for i in range(len(people))]
    return sum(terms) / len(terms) if terms else 0


@given(st.sampled_from("abc"), st.lists(st.sampled_from("abc"), max_size=12))
def test_equal_to_leaving_out_one_by_one(answer, people):
    assert leave_one_out(answer, people) == pytest.approx(left_out_one_by_one(answer, people), abs=1e-12)


@pytest.mark.parametrize(("same", "expected"), [(0, 0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1), (10, 1)])
def test_ten_people(same, expected):
    assert leave_one_out("x", ["x"] * same + ["y"] * (10 - same)) == pytest.approx(expected)


def test_answers_are_normalised():
    answers = ["the nokia", "Nokia.", "NOKIA", "nokia"] + ["two"] * 6
    assert SoftAccuracy.score("Nokia", {"answers": answers}) == 1
    assert SoftAccuracy.score("2", {"answers": answers}) == 1
    assert SoftAccuracy.score("Nokia phone", {"answers": answers}) == 0
    assert SoftAccuracy.score("", {"answers": []}) == 0


def test_textvqa_reference(shared):
    cases = reference_cases(shared, "textvqa")
    items = [case for case in cases if case["kind"] == "item"]
    scores = [SoftAccuracy.score(case["pred"], {"answers": case["gt_answers"]}) for case in items]
    for case, score in zip(items, scores, strict=True):
        assert evalai_answer(case["pred"]) == case["submission_answer"]
        assert score == pytest.approx(case["llava_m4c"], abs=1e-6)
        assert score == pytest.approx(case["lmms_eval"], abs=1e-6)
    start = 0
    for case in cases:
        if case["kind"] == "aggregate":
            part = scores[start : start + case["n"]]
            assert case["llava_m4c_accuracy"] == mean_of(part)
            start += case["n"]
    assert start == len(items) >= 300
    metric = SoftAccuracy()
    metric.update([case["pred"] for case in items], [{"answers": case["gt_answers"]} for case in items])
    assert metric.compute()["accuracy"].item() == mean_of(scores)


def test_vizwiz_reference(shared):
    cases = reference_cases(shared, "vizwiz_vqa")
    assert len(cases) >= 200
    for case in cases:
        assert evalai_answer(case["pred"]) == case["submission_answer"]
        score = SoftAccuracy.score(case["pred"], {"answers": case["gt_answers"]})
        assert score == pytest.approx(case["lmms_eval"], abs=1e-6)
