"""MMLU: prompts of both styles, the compressible prefix, three forms of files."""

from collections import Counter

import pytest

from subtoken_train.evaluation.metrics.likelihoods import MultipleChoice
from subtoken_train.evaluation.tasks import build_task
from tests.support.benchmark_folders import mmlu_letters, mmlu_numbers, mmlu_parquet
from tests.support.vqa_cases import reference_cases, refused

PREFIX = (
    "The following are multiple choice questions (with answers) about high school physics.\n\n"
    "What is 1?\nA. one\nB. two\nC. three\nD. four\nAnswer: A\n\n"
    "What is 2?\nA. one\nB. two\nC. three\nD. four\nAnswer: B\n\n"
)
ASKED = "What is 3?\nA. one\nB. two\nC. three\nD. four\nAnswer:"
EXAMPLES, QUESTIONS = [("What is 1?", 0), ("What is 2?", 1)], [(" What is 3? ", 2), ("What is 4?", 3)]
SUBJECT = "high_school_physics"
SPLITS = {"dev": EXAMPLES, "test": QUESTIONS}
WRITERS = (mmlu_letters, mmlu_numbers, mmlu_parquet)


@pytest.mark.parametrize("write", WRITERS)
def test_a_question_after_its_examples(tmp_path, write):
    first, second = build_task("mmlu", write(tmp_path, SUBJECT, SPLITS), num_fewshot=2).samples()
    assert first.prompt == PREFIX + ASKED
    assert first.prompt[: first.context_characters] == PREFIX
    assert first.choices == (" A", " B", " C", " D")
    assert (first.id, first.kind, first.reference) == ("high_school_physics/0", SUBJECT, {"answer": 2})
    assert (second.id, second.reference) == ("high_school_physics/1", {"answer": 3})
    assert second.prompt.startswith(PREFIX)


def test_without_examples_the_description_remains(tmp_path):
    sample, _ = build_task("mmlu", mmlu_letters(tmp_path, SUBJECT, SPLITS), num_fewshot=0).samples()
    before = "The following are multiple choice questions (with answers) about high school physics.\n\n"
    assert sample.prompt == before + ASKED
    assert sample.context_characters == len(before)


def test_the_authors_style(tmp_path):
    sample, _ = build_task("mmlu", mmlu_letters(tmp_path, SUBJECT, SPLITS), num_fewshot=2, style="hendrycks").samples()
    prefix = PREFIX.replace("about high", "about  high")
    assert sample.prompt == prefix + ASKED.replace("What is 3?", " What is 3? ")


@pytest.mark.slow
def test_all_real_questions_and_reference_prompts(shared):
    folder = shared / "realdata" / "mmlu"
    if not folder.is_dir():
        pytest.skip("reference material (mmlu) is absent")
    task = build_task("mmlu", folder)
    samples = {sample.id: sample for sample in task.samples()}
    assert len(samples) == task.expected_rows == 14_042
    assert len(Counter(sample.kind for sample in samples.values())) == 57
    cases = reference_cases(shared, "mmlu")
    forms = {
        (style, shots): other(folder, style, shots)
        for style in ("lm_eval", "hendrycks")
        for shots in {0, *(case["num_fewshot"] for case in cases)}
    }
    for case in cases:
        name = f"{case['subject']}/{case['index']}"
        sample = forms["lm_eval", case["num_fewshot"]][name]
        assert sample.prompt == case["lm_eval_context"]
        assert list(sample.choices) == case["lm_eval_continuations"]
        assert sample.reference["answer"] == case["doc"]["answer"]
        assert sample.prompt[: sample.context_characters].endswith("\n\n")
        assert forms["hendrycks", case["num_fewshot"]][name].prompt == case["hendrycks_prompt"]
    scored = [case for case in reference_cases(shared, "lm_loglikelihood") if case["kind"] == "multiple_choice"]
    assert scored
    for case in scored:
        sample = forms["lm_eval", 0][f"{case['subject']}/{case['index']}"]
        assert (sample.prompt, list(sample.choices)) == (case["context"], case["continuations"])
        assert MultipleChoice.score(case["loglikelihood"], sample.reference) == (case["pred"] == case["answer"])


def other(folder, style, shots):
    return {sample.id: sample for sample in build_task("mmlu", folder, num_fewshot=shots, style=style).samples()}


@pytest.mark.parametrize("write", WRITERS)
def test_too_few_examples(tmp_path, write):
    refused(
        r"subject high_school_physics has 2 of 5 examples in dev\. Parquet: hf",
        "mmlu",
        write(tmp_path, SUBJECT, SPLITS),
    )


def test_mistakes(tmp_path):
    refused(r"has no all/dev-\*\.parquet", "mmlu", tmp_path)
    mmlu_numbers(tmp_path, SUBJECT, {**SPLITS, "test": [("What?", 4)]})
    refused(
        r"physics_test\.csv, line 2: 4 choices with answer -?\d; it needs 4 choices", "mmlu", tmp_path, num_fewshot=0
    )
    path = tmp_path / "test" / f"{SUBJECT}_test.csv"
    path.write_text(path.read_text().rpartition(",")[0])
    refused(r"physics_test\.csv, line 2: 5 cells, but 6 columns", "mmlu", tmp_path, num_fewshot=0)
    path.unlink()
    refused(r"test has no \*_test\.csv", "mmlu", tmp_path, num_fewshot=0)
