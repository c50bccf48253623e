"""MathVista: prompts, both forms of files, the real problems; the original's normalising, and what rules extract."""

import json
import shutil
from collections import Counter

import pytest
from datasets import Dataset, Features, Image, List, Value

from subtoken_train.evaluation.tasks import build_task
from subtoken_train.evaluation.tasks.math_problems import MathVistaAccuracy, extract, mathvista_prompt, normalise
from tests.support.benchmark_folders import picture, reference_cases, refused

CHOICE = {
    "pid": "3", "question": "Find ∠BOC.", "image": "images/3.jpg", "choices": ["135°", "140°"], "unit": None,
    "precision": None, "answer": "140°", "question_type": "multi_choice", "answer_type": "text",
}  # fmt: skip
NUMBER = CHOICE | {"choices": None, "question_type": "free_form", "answer_type": "integer", "answer": "7", "unit": "g"}
FLOAT = NUMBER | {"answer_type": "float", "precision": 1.0, "unit": None, "answer": "1.2"}
LIST = FLOAT | {"answer_type": "list", "precision": None, "answer": "[1, 2]"}
SINGLE = "Find ∠BOC.\nAnswer the question using a single floating-point number with"


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (CHOICE, "Find ∠BOC.\nA. 135°\nB. 140°\nAnswer with the option's letter from the given choices directly."),
        (NUMBER, "Find ∠BOC. (Unit: g)\nAnswer the question using a single integer number."),
        (FLOAT, f"{SINGLE} one decimal place."),
        (FLOAT | {"precision": 2}, f"{SINGLE} two decimal places."),
        (LIST | {"choices": []}, "Find ∠BOC.\nAnswer the question using a Python list."),
    ],
)
def test_prompts(problem, expected):
    assert mathvista_prompt(problem) == expected


def test_the_projects_own_file(tmp_path):
    (tmp_path / "testmini.json").write_text(json.dumps({"3": CHOICE, "4": NUMBER | {"pid": "4"}}), encoding="utf-8")
    first, second = build_task("mathvista", tmp_path).samples()
    assert first.prompt.startswith("<image>\nFind ∠BOC.\nA. 135°")
    assert first.images == (tmp_path / "images" / "3.jpg",)
    assert first.reference == {key: CHOICE[key] for key in first.reference}
    assert (second.id, second.kind) == ("4", "free_form")
    metric = build_task("mathvista", tmp_path).metric()
    metric.update(["B. 140°", "It is 8."], [first.reference, second.reference])
    assert metric.compute()["accuracy"] == 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": ""}, "testmini.json, '3': no answers, so this is another split's file; use that of 'testmini'"),
        ({"unit": KeyError}, "testmini.json, '3': no column unit; it has pid, question"),
        (FLOAT | {"precision": 3}, "problem 3: no prompt for an answer of type 'float' with precision 3"),
    ],
)
def test_a_broken_problem(tmp_path, change, message):
    problem = {key: value for key, value in (CHOICE | change).items() if value is not KeyError}
    (tmp_path / "testmini.json").write_text(json.dumps({"3": problem}), encoding="utf-8")
    refused(message, "mathvista", tmp_path)


def test_the_hubs_files(tmp_path):
    shown = {"decoded_image": {"bytes": picture(), "path": None}}
    features = dict.fromkeys("pid question image unit answer question_type answer_type".split(), Value("string"))
    features |= {"choices": List(Value("string")), "precision": Value("double"), "decoded_image": Image()}
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "testmini-00000-of-00001.parquet"
    Dataset.from_list([CHOICE | shown, FLOAT | shown | {"pid": "9"}], features=Features(features)).to_parquet(path)
    first, second = build_task("mathvista", tmp_path).samples()
    assert second.prompt.endswith("floating-point number with one decimal place.")
    metric = build_task("mathvista", tmp_path).metric()
    metric.update(["B", "1.23"], [first.reference, second.reference])
    assert metric.compute() == {"accuracy": 1}


@pytest.mark.slow
def test_testmini(shared, tmp_path):
    shutil.copy(shared / "realdata" / "mathvista" / "testmini.json", tmp_path)
    task = build_task("mathvista", tmp_path)
    samples = task.samples()
    assert len(samples) == task.rows == task.expected_rows
    assert Counter(sample.kind for sample in samples) == {"multi_choice": 540, "free_form": 460}
    assert all(sample.prompt.count("<image>") == 1 for sample in samples)
    # their choices are "(c)", "(a)", ...: the original, too, takes "(b)" for the letter of the second one
    assert [s.id for s in samples if not task.metric().score(s.reference["answer"], s.reference)] == ["168", "849"]


CHOICES = ["135°", "140°", "145°"]


def test_golden(shared):
    for row in reference_cases(shared, "mathvista"):
        keys = ("extraction", "choices", "question_type", "answer_type", "precision")
        assert normalise(*(row[key] for key in keys)) == row["normalized"], row


EXTRACTED = [
    *((response, CHOICES, "multi_choice", "text", expected) for response, expected in (
        ("140°", "140°"), ("B", "B"), ("B.", "B"), ("(B) 140°", "B"), ("B. 140°", "B"), ("b", "B"), ("(c).", "C"),
        ("The correct answer is (B) 140°.", "B"), ("So the answer is b", "B"), ("Answer: C", "C"),
        ("The angle is 140° because", "140°"), ("A triangle", "A triangle"),
        ("The answer is a triangle", "The answer is a triangle"),
        ("Option A is wrong, so the answer is (c) 145°", "C"), ("either 135° or 140°", "either 135° or 140°"),
        ('The answer is "145°".', "145°"), ("**B**", "B"), ("Answer: **C**", "C"), ("**(B) 140°**", "B"),
        (r"\boxed{B}", "B"), (r"The angles add up, so the result is $\boxed{\text{C}}$.", "C"),
    )),
    *((response, None, "free_form", kind, expected) for response, kind, expected in (
        ("14", "integer", "14"), ("There are 3 left of 1,400.", "integer", "1400."), ("-2e3", "float", "-2e3"),
        ("The answer is 1.45", "float", "1.45"), ("The answer is 14 in 3 baskets", "integer", "14"),
        ("My answer: forty, 40 of 50", "integer", "40"), ("about [1, 2] then [3, 4]", "list", "[3, 4]"),
        ("none", "integer", "none"), ("\N{MINUS SIGN}3", "integer", "-3"), ("[2007,2008]", "list", "[2007, 2008]"),
        ("it falls by \N{MINUS SIGN}2.5", "float", "-2.5"), ("[ 2007 ,2008 ]", "list", "[2007, 2008]"),
        (r"6 of 7, hence \boxed{42} in all of 50", "integer", "42"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("response", "choices", "question", "kind", "expected"), EXTRACTED)
def test_what_is_extracted(response, choices, question, kind, expected):
    assert extract(response, choices, question, kind) == expected


def reference(kind, answer, precision=None, choices=None):
    question = "free_form" if choices is None else "multi_choice"
    form = {"choices": choices, "question_type": question, "answer_type": kind}
    return {**form, "precision": precision, "answer": answer}


def test_accuracy():
    metric = MathVistaAccuracy()
    angle = reference("text", "145°", choices=CHOICES)
    references = [reference("integer", "1400"), reference("float", "1.2", precision=1.0), angle, angle]
    metric.update(["It is 1,400.", "1.23", "(C)", ""], references)
    assert metric.compute() == {"accuracy": 0.75}
