"""Short answers against texts, in every reading."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.evaluation.metrics.short_answers import (
    ANLS,
    Answered,
    ExactMatch,
    RelaxedAccuracy,
    gqa_answer,
    levenshtein,
    relaxed_match,
)
from tests.support.vqa_cases import mean_of, reference_cases

words = st.text(alphabet="ab ", max_size=7)


@cache
def by_definition(first, second):
    if not first or not second:
        return len(first) + len(second)
    kept = by_definition(first[1:], second[1:]) + (first[0] != second[0])
    return min(kept, 1 + by_definition(first[1:], second), 1 + by_definition(first, second[1:]))


@given(words, words)
def test_levenshtein_is_the_definition(first, second):
    assert levenshtein(first, second) == by_definition(first, second) == levenshtein(second, first)


def test_distance_of_texts_longer_than_a_beam():
    assert levenshtein("x" * 60 + "abc", "abc" + "x" * 60) == 6


@pytest.mark.parametrize(
    ("prediction", "answers", "llava", "lmms"),
    [
        ("0.28", ["0.28"], 1, 1),
        ("University of Californa", ["university of california"], 23 / 24, 23 / 24),
        ("cat", ["dog"], 0, 0),
        ("ab", ["ax"], 0.5, 0.5),
        ("abx", ["acy", "abc"], 2 / 3, 2 / 3),
        ("new  york", ["new york"], 8 / 9, 1),
        (" 7b ", ["15b"], 0, 0.5),
        ("", [""], 1, 1),
        ("  ", [""], 1, 1),
        ("", ["x"], 0, 0),
        ("ß", ["ss"], 0, 0),
        ("ßa", ["sa"], 0.5, 2 / 3),
    ],
)
def test_known_answers(prediction, answers, llava, lmms):
    figures = ANLS.figures(prediction, {"answers": answers})
    assert figures == {"llava_anls": pytest.approx(llava), "lmms_anls": pytest.approx(lmms)}
    assert ANLS.score(prediction, {"answers": answers}) == pytest.approx(lmms)


def test_reference(shared):
    cases = reference_cases(shared, "anls")
    for case in cases:
        figures = ANLS.figures(case["pred"], {"answers": case["gt_answers"]})
        assert figures["lmms_anls"] == pytest.approx(case["lmms_eval_anls"], abs=1e-6)
        if case["llava_m4c_anls"] == "ZeroDivisionError":
            assert figures["llava_anls"] == 1
        else:
            assert figures["llava_anls"] == pytest.approx(case["llava_m4c_anls"], abs=1e-6)


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
    metric = ExactMatch()
    for case in cases:
        assert gqa_answer(case["pred"]) == case["llava_converted"]
        metric.update([case["pred"]], [{"answer": case["target"]}])
        assert ExactMatch.score(case["pred"], {"answer": case["target"]}) == case["llava_gqa_correct"]
    scores = metric.compute()
    assert scores["accuracy"] == mean_of([case["llava_gqa_correct"] for case in cases])
    assert scores["lmms_exact_match"] == mean_of([case["lmms_exact_match"] for case in cases])


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
def test_known_answers_of_chartqa(prediction, target, right):
    assert relaxed_match(prediction, target) is right


def test_kinds_have_their_own_scores():
    metric = RelaxedAccuracy()
    metric.update(["1", "2"], [{"answer": "1", "kind": "human"}, {"answer": "1", "kind": "human"}])
    assert metric.compute() == {"relaxed_accuracy": 0.5, "human": 0.5}
    metric.update(["7", "8"], [{"answer": "7", "kind": "augmented"}] * 2)
    expected = {"relaxed_accuracy": 0.5, "human": 0.5, "augmented": 0.5}
    assert metric.compute() == expected


def test_reference_of_chartqa(shared):
    cases = reference_cases(shared, "chartqa_relaxed")
    for case in cases:
        assert relaxed_match(case["pred"], case["target"]) is case["lmms_eval"], case


def test_share_of_answers():
    metric = Answered()
    metric.update(["A", " ", "", "no idea"], [{}] * 4)
    assert metric.compute() == {"answered": 0.5}
