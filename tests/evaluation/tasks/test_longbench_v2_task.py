"""LongBench v2: what its ``pred.py`` asks, which letter it reads, and files that it cannot be."""

import json

import pytest

from subtoken_train.evaluation.tasks import build_task
from subtoken_train.evaluation.tasks.longbench import LongBenchV2Accuracy, said_letter
from tests.support.vqa_cases import refused

ROW = {
    "_id": "66f3", "domain": "Code Repository Understanding", "sub_domain": "x", "difficulty": "hard", "length": "long",
    "question": " Which?\n", "choice_A": "one ", "choice_B": "two", "choice_C": "three", "choice_D": "four",
    "answer": "C", "context": "\nA text with $Q$ in it.\n",
}  # fmt: skip
PROMPT = (
    "Please read the following text and answer the question below.\n\n<text>\nA text with Which? in it.\n</text>\n\n"
    "What is the correct answer to this question: Which?\nChoices:\n(A) one\n(B) two\n(C) three\n(D) four\n\n"
    'Format your response as follows: "The correct answer is (insert answer here)".'
)


def write(folder, *rows):
    (folder / "data.json").write_text(json.dumps([{**ROW, **row} for row in rows]), encoding="utf-8")
    return folder


def test_how_it_is_asked(tmp_path):
    write(tmp_path, {}, {"_id": "7", "difficulty": "easy"})
    first, second = build_task("longbench_v2", tmp_path).samples()
    assert first.prompt == PROMPT
    assert first.prompt[: first.context_characters].endswith("A text with Which? in it.")
    assert (first.id, first.kind, first.cut_middle, first.chat) == ("66f3", ROW["domain"], True, False)
    assert second.reference == {"answer": "C", "difficulty": "easy", "length": "long"}
    (whole, _) = build_task("longbench_v2", tmp_path, question="compressed", chat=True).samples()
    assert whole.chat
    assert whole.prompt[whole.context_characters :] == PROMPT.rpartition("\n")[2]


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The correct answer is (B).", "B"),
        ("**The correct answer is (C)**", "C"),
        ("The correct answer is D", "D"),
        ("The correct answer is A, no: The correct answer is (B)", "B"),
        ("the correct answer is (B)", None),
        ("The correct answer is (E)", None),
        ("B", None),
    ],
)
def test_the_letter_that_an_answer_says(text, letter):
    assert said_letter(text) == letter


def test_scores_by_difficulty_and_length():
    metric = LongBenchV2Accuracy()
    kinds = [("easy", "short"), ("hard", "short"), ("hard", "long")]
    references = [{"answer": "A", "difficulty": first, "length": second} for first, second in kinds]
    metric.update(["The correct answer is (A)", "?", "The correct answer is A"], references)
    scores = metric.compute()
    assert scores == {"accuracy": pytest.approx(2 / 3), "easy": 1, "hard": 0.5, "short": 0.5, "long": 1}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": "E"}, r"data\.json, entry\[1\]: unknown answer 'E'\. Allowed: A, B, C, D"),
        ({"length": "huge"}, r"unknown length 'huge'"),
        ({"difficulty": None}, r"unknown difficulty None"),
        ({"context": 3}, r"entry\[1\]: context is 3, but must be a text"),
        ({"_id": "66f3"}, r"entry\[1\]: id '66f3' appears twice, first in .*entry\[0\]"),
    ],
)
def test_rows_that_cannot_be_scored(tmp_path, row, message):
    refused(message, "longbench_v2", write(tmp_path, {}, {"_id": "7", **row}))


def test_files_that_are_none(tmp_path):
    refused(r"has no data\.json\. hf download THUDM/LongBench-v2", "longbench_v2", tmp_path)
    refused("longbench_v2 reads a folder, and THUDM/LongBench-v2 is none", "longbench_v2", "THUDM/LongBench-v2")
    (tmp_path / "data.json").write_text("{}")
    refused(r"data\.json is no list; is it another file\?", "longbench_v2", tmp_path)
