"""The answer normaliser: its oddities one by one, and the reference's texts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.evaluation.metrics.vqa_accuracy import (
    APOSTROPHES,
    MARKS,
    OFFICIAL_COMMA,
    evalai_answer,
    plain_words,
    without_breaks,
    without_marks,
    word_tokens,
)
from tests.support.vqa_cases import reference_cases


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Two Dogs.", "2 dogs"),
        ("None", "0"),
        ("eleven", "eleven"),
        ("the one", "1"),
        ("a an the", ""),
        ("U.S.A.", "usa"),
        ("5.", "5"),
        (".5", ".5"),
        ("8:30 p.m.", "8:30 pm"),
        ("$1,000", "$1000"),
        ("red,white,blue", "redwhiteblue"),
        ("dont", "don't"),
        ("its", "its"),
        ("it's", "it 's"),
        ("Im", "im"),
        ("somebody'd", "somebodyd"),
        ("coca-cola", "coca cola"),
        ("coca -cola, wi-fi", "coca cola wifi"),
        ("line\nend\ttab", "line end tab"),
        ("  ", ""),
    ],
)
def test_what_an_answer_becomes(text, expected):
    assert evalai_answer(text) == expected


def test_steps():
    assert word_tokens(" She's, OK? ") == "she 's ok"
    assert without_breaks("\ta\nb ") == "a b"
    assert without_marks("a-b") == "a b"
    assert without_marks("a -b") == "a b"
    assert without_marks("x;y 1,2") == "xy 12"
    assert plain_words("A  Dog wasnt THE one") == "dog wasn't 1"


def test_two_commas_between_digits_differ():
    assert without_marks("1,,2") == "12"
    assert without_marks("1,,2", OFFICIAL_COMMA) == "1  2"
    assert without_marks("1,2", OFFICIAL_COMMA) == "12"


def test_only_32_full_stops_go():
    assert without_marks("a." * 40) == "a" * 32 + "a." * 8


def test_every_contraction_loses_one_apostrophe():
    for bare, full in APOSTROPHES.items():
        if bare != "somebody'd":
            assert len(full) == len(bare) + 1
            assert bare.replace("'", "") == full.replace("'", "")
    assert not {"its", "were", "well", "wed", "shed", "ill"} & APOSTROPHES.keys()


@given(st.text(alphabet=st.sampled_from(" ab1.'," + MARKS)))
def test_no_mark_stays(text):
    assert not set(MARKS) & set(without_marks(text))
    assert "  " not in evalai_answer(text)


def test_reference_texts(shared):
    cases = reference_cases(shared, "vqa_normalizer")
    assert len(cases) >= 655
    for case in cases:
        text = case["input"]
        assert evalai_answer(text) == case["processed"], text
        assert without_marks(text) == case["punctuation_only"], text
        assert plain_words(text) == case["digit_article_only"], text
