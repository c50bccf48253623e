"""Which option an answer names, by each program's rule."""

import pytest

from subtoken_train.evaluation.metrics.choices import (
    lmms_letter,
    lmms_static_letter,
    plain_letter,
    vlmevalkit_letter,
)
from tests.support.vqa_cases import reference_cases

OPTIONS = {"A": "cat", "B": "red dog", "C": "house"}


@pytest.mark.parametrize(
    ("text", "plain", "lmms", "static", "vlmevalkit"),
    [
        ("B", "B", "B", "B", "B"),
        ("(C).", "C", "C", "C", "C"),
        ("B. red dog", "B", "B", "B", "B"),
        ("a", None, None, None, None),
        ("D", None, "D", "D", None),
        ("A red dog", None, "A", "A", "A"),
        ("A big red dog", None, "B", "B", "A"),
        ("a red dog", None, "B", "B", "B"),
        ("The answer is A", None, None, "A", "A"),
        ("I can see the answer: B, and the reasons are many", None, "B", "B", None),
        ("**C**", None, None, "C", "C"),
        ("A cat or B", None, "A", "A", "A"),
        ("Z", None, None, None, "Z"),
        ("Cannot determine the answer", None, None, "C", "Z"),  # the static task's last resort: a C in any word
        ("", None, None, None, None),
    ],
)
def test_known_answers(text, plain, lmms, static, vlmevalkit):
    found = plain_letter(text, OPTIONS), lmms_letter(text, OPTIONS), lmms_static_letter(text, OPTIONS)
    assert (*found, vlmevalkit_letter(text, OPTIONS)) == (plain, lmms, static, vlmevalkit)


def test_reference_answers(shared):
    cases = [case for case in reference_cases(shared, "mmbench") if case["kind"] == "match"]
    assert len(cases) >= 300
    for case in cases:
        assert (lmms_letter(case["pred"], case["choices"]) or False) == case["lmms_can_infer"]
        assert (vlmevalkit_letter(case["pred"], case["choices"]) or False) == case["vlmevalkit_can_infer"]
