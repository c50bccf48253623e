"""The texts made on the spot: what each asks has exactly the stated answer, at the length asked for."""

import re
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subtoken_train.evaluation.tasks import build_task
from subtoken_train.evaluation.tasks.ruler import MAKERS, NEW_TOKENS, context_end, family
from tests.support.vqa_cases import refused

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
