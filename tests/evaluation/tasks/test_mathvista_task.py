"""MathVista: prompts written out, both forms of files, and the real problems."""

import json
import shutil
from collections import Counter
from io import BytesIO

import pytest
from datasets import Dataset, Features, Image, List, Value
from PIL import Image as Pictures

from subtoken_train.evaluation.tasks import build_task
from subtoken_train.evaluation.tasks.mathvista import mathvista_prompt
from tests.support.vqa_cases import refused

CHOICE = {
    "pid": "3",
    "question": "Find ∠BOC.",
    "image": "images/3.jpg",
    "choices": ["135°", "140°"],
    "unit": None,
    "precision": None,
    "answer": "140°",
    "question_type": "multi_choice",
    "answer_type": "text",
}
NUMBER = CHOICE | {"choices": None, "question_type": "free_form", "answer_type": "integer", "answer": "7", "unit": "g"}
FLOAT = NUMBER | {"answer_type": "float", "precision": 1.0, "unit": None, "answer": "1.2"}
LIST = FLOAT | {"answer_type": "list", "precision": None, "answer": "[1, 2]"}


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (CHOICE, "Find ∠BOC.\nA. 135°\nB. 140°\nAnswer with the option's letter from the given choices directly."),
        (NUMBER, "Find ∠BOC. (Unit: g)\nAnswer the question using a single integer number."),
        (
            FLOAT,
            "Find ∠BOC.\nAnswer the question using a single floating-point number with one decimal place.",
        ),
        (
            FLOAT | {"precision": 2},
            "Find ∠BOC.\nAnswer the question using a single floating-point number with two decimal places.",
        ),
        (LIST | {"choices": []}, "Find ∠BOC.\nAnswer the question using a Python list."),
    ],
)
def test_prompts(problem, expected):
    assert mathvista_prompt(problem) == expected


def test_an_answer_without_a_form():
    with pytest.raises(ValueError, match="problem 3: no prompt for an answer of type 'float' with precision 3"):
        mathvista_prompt(FLOAT | {"precision": 3})


def test_the_projects_own_file(tmp_path):
    (tmp_path / "testmini.json").write_text(json.dumps({"3": CHOICE, "4": NUMBER | {"pid": "4"}}), encoding="utf-8")
    first, second = build_task("mathvista", tmp_path).samples()
    assert first.prompt.startswith("<image>\nFind ∠BOC.\nA. 135°")
    assert first.images == (tmp_path / "images" / "3.jpg",)
    assert first.reference == {key: CHOICE[key] for key in first.reference}
    assert (second.id, second.kind) == ("4", "free_form")
    metric = build_task("mathvista", tmp_path).metric()
    metric.update(["B. 140°", "It is 8."], [first.reference, second.reference])
    assert float(metric.compute()["accuracy"]) == 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": ""}, "testmini.json, '3': no answers, so this is another split's file; use that of 'testmini'"),
        ({"unit": KeyError}, "testmini.json, '3': no column unit; it has pid, question"),
    ],
)
def test_a_broken_problem(tmp_path, change, message):
    problem = {key: value for key, value in (CHOICE | change).items() if value is not KeyError}
    (tmp_path / "testmini.json").write_text(json.dumps({"3": problem}), encoding="utf-8")
    refused(message, "mathvista", tmp_path)


def test_the_hubs_files(tmp_path):
    content = BytesIO()
    Pictures.new("RGB", (2, 2)).save(content, "PNG")
    rows = [row | {"decoded_image": {"bytes": content.getvalue(), "path": None}} for row in (CHOICE, FLOAT)]
    rows[1]["pid"] = "9"
    text = Value("string")
    names = ("pid", "question", "image", "unit", "answer", "question_type", "answer_type")
    features = dict.fromkeys(names, text) | {"choices": List(text), "precision": Value("double")}
    table = {name: [row[name] for row in rows] for name in (*features, "decoded_image")}
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "testmini-00000-of-00001.parquet"
    Dataset.from_dict(table, features=Features(features | {"decoded_image": Image()})).to_parquet(path)
    first, second = build_task("mathvista", tmp_path).samples()
    assert second.prompt.endswith("floating-point number with one decimal place.")
    metric = build_task("mathvista", tmp_path).metric()
    metric.update(["B", "1.23"], [first.reference, second.reference])
    assert {name: float(value) for name, value in metric.compute().items()} == {"accuracy": 1, "lmms_accuracy": 0.5}


@pytest.mark.slow
def test_testmini(shared, tmp_path):
    shutil.copy(shared / "realdata" / "mathvista" / "testmini.json", tmp_path)
    task = build_task("mathvista", tmp_path)
    samples = task.samples()
    assert len(samples) == task.rows == task.expected_rows
    assert Counter(sample.kind for sample in samples) == {"multi_choice": 540, "free_form": 460}
    assert all(sample.prompt.count("<image>") == 1 for sample in samples)
    wrong = [s.id for s in samples if not task.metric().score(s.reference["answer"], s.reference)]
    # their choices are "(c)", "(a)", ...: the original, too, takes "(b)" for the letter of the second one
    assert wrong == ["168", "849"]
