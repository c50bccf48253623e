"""RULER: context and question in each form of its files; made texts have exactly the stated answer, at their length."""

import json
import re
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from subtoken_train.evaluation.tasks import build_task
from subtoken_train.evaluation.tasks.ruler import MAKERS, NEW_TOKENS, context_end, family
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


NEEDLE = re.compile(r"One of the special magic (number|uuid)s for (\S+) is: (\S+)\.")


def solve_niah(sample):
    key = re.search(r"for (\S+) mentioned", sample.prompt[sample.context_characters :]).group(1)
    return [value for _, name, value in NEEDLE.findall(sample.prompt[: sample.context_characters]) if name == key]


def solve_vt(sample):
    context, question = sample.prompt[: sample.context_characters], sample.prompt[sample.context_characters :]
    text = context[context.rindex("Memorize and track") :]  # after the example
    value = re.search(r"assigned the value (\d+)", question).group(1)
    holds = {}
    for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text):
        holds[name] = holds.get(source, source)
    return [name for name, found in holds.items() if found == value]


def solve_cwe(sample):
    context = sample.prompt[: sample.context_characters]
    text = context[context.rindex("Below is a numbered list") :]
    return [word for word, _ in Counter(re.findall(r"\d+\. ([a-z]+)", text)).most_common(10)]


def solve_fwe(sample):
    words = sample.prompt[: sample.context_characters].split("coded words. ")[-1].split()
    (_, dots), *others = [(word, count) for word, count in Counter(words).most_common(5)]
    assert dots > others[0][1] > others[1][1] > others[2][1] > others[3][1]
    return [word for word, _ in others[:3]]


SOLVERS = {"niah": solve_niah, "vt": solve_vt, "cwe": solve_cwe, "fwe": solve_fwe}


@pytest.mark.parametrize("length", [800, 4096])
@pytest.mark.parametrize("task", list(MAKERS))
def test_each_question_has_its_one_answer(task, length):
    samples = build_task("ruler_synthetic", tasks=[task], length=length, samples_per_task=4).samples()
    assert len(samples) == 4
    for sample in samples:
        assert sorted(SOLVERS[family(task)](sample)) == sorted(sample.reference["answers"])
        assert context_end(sample.prompt, task) == sample.context_characters
        words = len(sample.prompt.split()) + NEW_TOKENS[family(task)]
        assert length - 60 <= words <= length
        assert (sample.kind, sample.max_new_tokens) == (task, NEW_TOKENS[family(task)])


@given(seed=st.integers(0, 10**6), size=st.integers(60, 300), task=st.sampled_from(list(MAKERS)))
@settings(max_examples=30, deadline=None)
def test_texts_are_a_function_of_the_generator(seed, size, task):
    first, second = (MAKERS[task].make(Random(seed), size) for _ in range(2))
    assert first == second
    assert first.answers != MAKERS[task].make(Random(seed + 1), size).answers


def test_seeds_and_samples_differ():
    texts = [build_task("ruler_synthetic", samples_per_task=2, length=600, seed=seed).samples() for seed in (0, 0, 1)]
    prompts = [[sample.prompt for sample in samples] for samples in texts]
    assert prompts[0] == prompts[1]
    assert len(set(prompts[0] + prompts[2])) == 24


def test_tokens_of_a_tokenizer():
    folder = Path(__file__).resolve().parents[3] / "checkpoints" / "tiny-llama"
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    options = {"tasks": ["niah_single_1"], "length": 400, "samples_per_task": 2, "tokenizer": str(folder)}
    for sample in build_task("ruler_synthetic", **options).samples():
        tokens = len(tokenizer(sample.prompt, add_special_tokens=False)["input_ids"])
        assert 300 <= tokens + 128 <= 400


def test_what_is_refused(tmp_path):
    refused(
        r"100 tokens or words for a prompt of vt, and its shortest text has \d+; raise",
        "ruler_synthetic",
        tasks=["vt"],
        length=130,
    )
    refused("cannot be loaded", "ruler_synthetic", tokenizer=str(tmp_path))
