"""RULER: the split of context and question in each form of its files."""

import json

import pytest
from datasets import Dataset

from subtoken_train.evaluation.tasks import build_task
from subtoken_train.evaluation.tasks.ruler import context_end
from tests.support.vqa_cases import refused

CONTEXT = (
    "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "number afterwards.\nThe grass is green.\nOne of the special magic numbers for calm-owl is: 1234567.\n"
)
QUESTION = "What is the special magic number for calm-owl mentioned in the provided text?"
PREFIX = " The special magic number for calm-owl mentioned in the provided text is"
QA = "Answer the question based on the given documents. Only give me the answer and do not output any other words."


def write_lines(folder, task, rows):
    (folder / task).mkdir(parents=True)
    path = folder / task / "validation.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def check(sample, name):
    assert sample.id == name
    assert sample.prompt == CONTEXT + QUESTION + PREFIX
    assert sample.prompt[: sample.context_characters] == CONTEXT
    assert sample.reference == {"task": "niah_single_1", "answers": ["1234567"]}
    assert (sample.max_new_tokens, sample.kind, sample.images, sample.choices) == (128, "niah_single_1", (), ())


def test_rulers_own_files_older_and_newer(tmp_path):
    older = {"index": 0, "input": CONTEXT + QUESTION + PREFIX, "outputs": ["1234567"], "length": 40}
    without = {**older, "index": 7, "answer_prefix": None}
    newer = {"index": 5, "input": CONTEXT + QUESTION, "outputs": ["1234567"], "answer_prefix": PREFIX}
    write_lines(tmp_path, "niah_single_1", [older, newer, without])
    first, second, third = build_task("ruler", tmp_path, tasks=["niah_single_1"]).samples()
    check(first, "niah_single_1-0")
    check(second, "niah_single_1-5")
    check(third, "niah_single_1-7")


def test_the_hubs_files(tmp_path):
    row = {
        "context": CONTEXT,
        "question": QUESTION,
        "answer_prefix": PREFIX,
        "answer": ["1234567"],
        "task": "niah_single_1",
        "max_new_tokens": 128,
    }
    other = row | {"context": f"{QA}\n\n", "question": "Question: who?", "answer_prefix": " Answer:", "task": "qa_1"}
    (tmp_path / "4096").mkdir()
    Dataset.from_list([row, other, row]).to_parquet(tmp_path / "4096" / "test-00000-of-00001.parquet")
    samples = build_task("ruler", tmp_path).samples()
    assert [sample.id for sample in samples] == ["niah_single_1-0", "qa_1-0", "niah_single_1-1"]
    check(samples[0], "niah_single_1-0")
    assert samples[1].max_new_tokens == 32
    assert len(build_task("ruler", tmp_path, tasks=["qa_1"]).samples()) == 1
    refused(r"no 8192/test-\*\.parquet", "ruler", tmp_path, length=8192)


@pytest.mark.parametrize(
    ("task", "question"),
    [
        ("niah_multikey_2", "What are all the special magic numbers for a and b mentioned"),
        ("vt", "Question: Find all variables that are assigned the value 12345 in the text above."),
        ("cwe", "Question: What are the 10 most common words in the above list?"),
        ("fwe", "Question: Do not provide any explanation. Please ignore the dots"),
        ("qa_2", f"{QA}\n\nQuestion: who?"),
    ],
)
def test_the_last_question_counts(task, question):
    example = f"before {question} an example\n\n"
    assert context_end(f"{example}context\n{question} Answer:", task) == len(example) + len("context\n")


def test_rows_of_a_complete_set():
    task = build_task("ruler")
    assert (task.rows, task.expected_rows) == (6_500, 6_500)
    assert build_task("ruler", tasks=["vt", "cwe"], rows_per_task=50).expected_rows == 100


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"index": 1, "input": "no question", "outputs": ["1"]}, "line 1: no question of RULER's task vt in it"),
        ({"index": 1, "input": "text", "outputs": []}, "line 1: input must be a text and outputs a list"),
        ({"index": 1, "input": "text"}, "line 1: no column outputs"),
    ],
)
def test_broken_lines_are_named(tmp_path, row, message):
    write_lines(tmp_path, "vt", [row])
    refused(message, "ruler", tmp_path, tasks=["vt"])


def test_a_task_without_its_file(tmp_path):
    write_lines(tmp_path, "vt", [])
    refused(r"cwe/validation.jsonl is missing", "ruler", tmp_path, tasks=["vt", "cwe"])
