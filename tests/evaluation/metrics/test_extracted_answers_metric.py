"""MathVista: the original's normalising, and what the rules extract from running text."""

import pytest

from subtoken_train.evaluation.tasks.mathvista import MathVistaAccuracy, equal, extract, normalise
from tests.support.vqa_cases import reference_cases

CHOICES = ["135°", "140°", "145°"]


def test_golden(shared):
    cases = reference_cases(shared, "mathvista")
    for row in cases:
        keys = ("extraction", "choices", "question_type", "answer_type", "precision")
        found = normalise(*(row[key] for key in keys))
        assert found == row["normalized"], row
        assert equal(found, row["answer"]) == row["safe_equal"], row


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("140°", "140°"),
        ("B", "B"),
        ("B.", "B"),
        ("(B) 140°", "B"),
        ("B. 140°", "B"),
        ("The correct answer is (B) 140°.", "B"),
        ("So the answer is b", "B"),
        ("Answer: C", "C"),
        ("The angle is 140° because", "140°"),
        ("A triangle", "A triangle"),
        ("The answer is a triangle", "The answer is a triangle"),
        ("b", "B"),
        ("(c).", "C"),
        ("Option A is wrong, so the answer is (c) 145°", "C"),
        ("either 135° or 140°", "either 135° or 140°"),
        ('The answer is "145°".', "145°"),
        ("**B**", "B"),
        ("Answer: **C**", "C"),
        ("**(B) 140°**", "B"),
        (r"\boxed{B}", "B"),
        (r"The angles add up, so the result is $\boxed{\text{C}}$.", "C"),
    ],
)
def test_choices(response, expected):
    assert extract(response, CHOICES, "multi_choice", "text") == expected


@pytest.mark.parametrize(
    ("response", "kind", "expected"),
    [
        ("14", "integer", "14"),
        ("There are 3 left of 1,400.", "integer", "1400."),
        ("The answer is 1.45", "float", "1.45"),
        ("The answer is 14 in 3 baskets", "integer", "14"),
        ("My answer: forty, 40 of 50", "integer", "40"),
        ("-2e3", "float", "-2e3"),
        ("about [1, 2] then [3, 4]", "list", "[3, 4]"),
        ("none", "integer", "none"),
        ("\N{MINUS SIGN}3", "integer", "-3"),
        ("it falls by \N{MINUS SIGN}2.5", "float", "-2.5"),
        (r"6 of 7, hence \boxed{42} in all of 50", "integer", "42"),
        ("[2007,2008]", "list", "[2007, 2008]"),
        ("[ 2007 ,2008 ]", "list", "[2007, 2008]"),
    ],
)
def test_numbers_and_lists(response, kind, expected):
    assert extract(response, None, "free_form", kind) == expected


def reference(kind, answer, precision=None, choices=None):
    question = "free_form" if choices is None else "multi_choice"
    return {
        "choices": choices,
        "question_type": question,
        "answer_type": kind,
        "precision": precision,
        "answer": answer,
    }


def test_accuracy_and_the_decimals_that_the_hub_stores():
    metric = MathVistaAccuracy()
    references = [
        reference("integer", "1400"),
        reference("float", "1.2", precision=1.0),
        reference("text", "145°", choices=CHOICES),
        reference("text", "145°", choices=CHOICES),
    ]
    metric.update(["It is 1,400.", "1.23", "(C)", ""], references)
    assert {name: float(value) for name, value in metric.compute().items()} == {"accuracy": 0.75, "lmms_accuracy": 0.5}
