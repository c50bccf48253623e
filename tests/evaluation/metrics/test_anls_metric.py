"""ANLS in both readings of white space, and the distance beside its recursive definition."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.evaluation.metrics.short_answers import ANLS, levenshtein
from tests.support.vqa_cases import reference_cases

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
    assert len(cases) >= 300
    for case in cases:
        figures = ANLS.figures(case["pred"], {"answers": case["gt_answers"]})
        assert figures["lmms_anls"] == pytest.approx(case["lmms_eval_anls"], abs=1e-6)
        if case["llava_m4c_anls"] == "ZeroDivisionError":
            assert figures["llava_anls"] == 1
        else:
            assert figures["llava_anls"] == pytest.approx(case["llava_m4c_anls"], abs=1e-6)
