"""MMLU, WikiText and mathematics: what is asked, what may be compressed, and their files."""

import json
from pathlib import Path

import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.evaluation.tasks import TASKS, build_task
from subtoken_train.evaluation.tasks.likelihoods import MultipleChoice, windows
from subtoken_train.evaluation.tasks.math_problems import MathAccuracy
from tests.support.benchmark_folders import mmlu_letters, mmlu_numbers, mmlu_parquet, reference_cases, refused

PREFIX = (
    "The following are multiple choice questions (with answers) about high school physics.\n\n"
    "What is 1?\nA. one\nB. two\nC. three\nD. four\nAnswer: A\n\n"
    "What is 2?\nA. one\nB. two\nC. three\nD. four\nAnswer: B\n\n"
)
ASKED = "What is 3?\nA. one\nB. two\nC. three\nD. four\nAnswer:"
EXAMPLES, QUESTIONS = [("What is 1?", 0), ("What is 2?", 1)], [(" What is 3? ", 2), ("What is 4?", 3)]
SUBJECT = "high_school_physics"
SPLITS = {"dev": EXAMPLES, "test": QUESTIONS}


@pytest.mark.parametrize("write", [mmlu_letters, mmlu_numbers, mmlu_parquet])
def test_a_question_after_its_examples(tmp_path, write):
    folder = write(tmp_path, SUBJECT, SPLITS)
    first, second = build_task("mmlu", folder, num_fewshot=2).samples()
    assert first.prompt == PREFIX + ASKED
    assert first.prompt[: first.context_characters] == PREFIX
    assert first.choices == (" A", " B", " C", " D")
    assert (first.id, first.kind, first.reference) == ("high_school_physics/0", SUBJECT, {"answer": 2})
    assert (second.id, second.reference) == ("high_school_physics/1", {"answer": 3})
    assert second.prompt.startswith(PREFIX)
    refused(r"subject high_school_physics has 2 of 5 examples in dev\. Parquet: hf", "mmlu", folder)


def test_without_examples_and_in_the_authors_style(tmp_path):
    folder = mmlu_letters(tmp_path, SUBJECT, SPLITS)
    sample, _ = build_task("mmlu", folder, num_fewshot=0).samples()
    before = PREFIX.partition("\n\n")[0] + "\n\n"
    assert (sample.prompt, sample.context_characters) == (before + ASKED, len(before))
    sample, _ = build_task("mmlu", folder, num_fewshot=2, style="hendrycks").samples()
    assert sample.prompt == PREFIX.replace("about high", "about  high") + ASKED.replace("What is 3?", " What is 3? ")


@pytest.mark.slow
def test_all_real_questions_and_reference_prompts(shared):
    folder = shared / "realdata" / "mmlu"
    if not folder.is_dir():
        pytest.skip("reference material (mmlu) is absent")

    def asked(style, shots):
        return {sample.id: sample for sample in build_task("mmlu", folder, num_fewshot=shots, style=style).samples()}

    samples = build_task("mmlu", folder).samples()
    assert len(samples) == 14_042
    assert len({sample.kind for sample in samples}) == 57
    cases = reference_cases(shared, "mmlu")
    shots = {0, *(case["num_fewshot"] for case in cases)}
    forms = {(style, count): asked(style, count) for style in ("lm_eval", "hendrycks") for count in shots}
    for case in cases:
        name = f"{case['subject']}/{case['index']}"
        sample = forms["lm_eval", case["num_fewshot"]][name]
        assert (sample.prompt, list(sample.choices)) == (case["lm_eval_context"], case["lm_eval_continuations"])
        assert sample.reference["answer"] == case["doc"]["answer"]
        assert sample.prompt[: sample.context_characters].endswith("\n\n")
        assert forms["hendrycks", case["num_fewshot"]][name].prompt == case["hendrycks_prompt"]
    scored = [case for case in reference_cases(shared, "lm_loglikelihood") if case["kind"] == "multiple_choice"]
    assert scored
    for case in scored:
        sample = forms["lm_eval", 0][f"{case['subject']}/{case['index']}"]
        assert (sample.prompt, list(sample.choices)) == (case["context"], case["continuations"])
        assert MultipleChoice.score(case["loglikelihood"], sample.reference) == (case["pred"] == case["answer"])


def test_mistakes(tmp_path):
    refused(r"has no all/dev-\*\.parquet", "mmlu", tmp_path)
    mmlu_numbers(tmp_path, SUBJECT, {**SPLITS, "test": [("What?", 4)]})
    words = r"physics_test\.csv, line 2: 4 choices with answer -?\d; it needs 4 choices"
    refused(words, "mmlu", tmp_path, num_fewshot=0)
    (tmp_path / "test" / f"{SUBJECT}_test.csv").unlink()
    refused(r"test has no \*_test\.csv", "mmlu", tmp_path, num_fewshot=0)


SIZES = {"context_words": 3, "prefix_words": 1, "query_words": 2}
TEXT = " = Title = \n\n one two  three four five ,\nsix seven eight \u00fcber nine\n"


def test_one_window_written_out(tmp_path):
    (tmp_path / "test.txt").write_text(TEXT, encoding="utf-8")
    first, second = build_task("wikitext", tmp_path, **SIZES).samples()
    assert first.prompt == " = Title = \n\n one"
    assert first.prompt[: first.context_characters] == " = Title ="
    assert first.choices == (" two  three",)
    assert first.reference == {"words": 2, "bytes": 11}
    assert (second.id, second.prompt, second.choices) == ("1", " four five ,\nsix", (" seven eight",))


def test_the_hubs_files(tmp_path):
    folder = tmp_path / "wikitext-103-raw-v1"
    folder.mkdir()
    lines = [line + "\n" for line in TEXT.split("\n")]
    Dataset.from_dict({"text": lines}).to_parquet(folder / "test-00000-of-00001.parquet")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "test.txt").write_text(TEXT, encoding="utf-8")
    plain = build_task("wikitext", tmp_path / "plain", **SIZES).samples()
    for source in (tmp_path, folder):
        assert build_task("wikitext", source, **SIZES).samples() == plain


@given(
    text=st.text(st.sampled_from("ab \n\u00e9\u2028"), max_size=200),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4)),
)
def test_windows_join_to_the_text(text, sizes):
    samples = list(windows(text, sizes))
    assert text.startswith("".join(sample.prompt + sample.choices[0] for sample in samples))
    assert len(samples) == len(text.split()) // sum(sizes)
    for sample in samples:
        context, asked = sample.prompt[: sample.context_characters], sample.prompt[sample.context_characters :]
        scored = sample.choices[0]
        assert tuple(len(part.split()) for part in (context, asked, scored)) == sizes
        assert sample.reference == {"words": sizes[2], "bytes": len(scored.encode())}


def test_too_little_text(tmp_path):
    refused("hf download Salesforce/wikitext", "wikitext", tmp_path)
    (tmp_path / "test.txt").write_text("only three words", encoding="utf-8")
    refused("has fewer words than one window of 1536; ask fewer", "wikitext", tmp_path)


MATH = {
    "problem": "What is half of $x=1$?", "solution": r"Halved: $\boxed{\frac{1}{2}}$.", "answer": r"\frac{1}{2}",
    "subject": "Prealgebra", "level": 1, "unique_id": "test/prealgebra/1.json",
}  # fmt: skip
AIME = {"problem": "Find $n$.", "answer": "70", "id": "0"}


def write(folder, *rows):
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def test_how_they_are_asked(tmp_path):
    (sample,) = build_task("math500", write(tmp_path, MATH)).samples()
    assert (sample.id, sample.kind, sample.stop) == (MATH["unique_id"], "Prealgebra", ("Problem:",))
    assert sample.prompt == "Problem: What is half of $x=1$?\nAnswer:"
    assert (sample.max_new_tokens, sample.messages, sample.chat) == (4096, (), False)
    first, second = build_task("aime25", write(tmp_path, AIME, AIME | {"answer": 7}), chat=True).samples()
    assert (first.id, second.id, first.max_new_tokens, first.stop) == ("0", "1", 32_768, ("Question:",))
    assert first.messages == ({"role": "user", "content": "Question: Find $n$.\nAnswer:"},)
    assert second.reference == {"answer": "7", "solution": r"\boxed{7}", "harness": "aime"}
    assert build_task("math500", max_new_tokens=9).options == {"chat": False, "max_new_tokens": 9}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"solution": "It is one half."}, r"test\.jsonl, line 2: the solution has no answer in \\boxed"),
        ({"problem": None}, "line 2: problem is None, but must be a text"),
    ],
)
def test_rows_that_cannot_be_scored(tmp_path, row, message):
    refused(message, "math500", write(tmp_path, MATH, MATH | row))


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    refused(r"has no data/test-\*\.parquet\. hf download math-ai/aime25 test\.jsonl", "aime25", tmp_path)
    monkeypatch.setattr("subtoken_train.errors.find_spec", lambda package: None)
    with pytest.raises(ValueError, match=r"needs math_verify, which is not installed: pip install .*\[eval\]"):
        build_task("math500").check_requirements()


@pytest.mark.parametrize(
    ("text", "answer", "accuracy"),
    [
        (r"Hence \boxed{70}.", "70", 1), ("So the answer is 70.", "70", 1), (r"70 of \boxed{71}", "70", 0),
        (r"It is $0.5$", r"\frac{1}{2}", 1), (r"so $\boxed{\frac12}$", r"\frac{1}{2}", 1), (r"\boxed{", "3", 0),
        (r"$(x-1)(x+1)$", "x^2-1", 1), (r"the interval $[2, 5)$", "[2,5)", 1), ("", "3", 0),
    ],
)  # fmt: skip
def test_how_answers_are_compared(text, answer, accuracy):
    pytest.importorskip("math_verify")
    assert MathAccuracy.figures(text, {"solution": rf"\boxed{{{answer}}}"}) == {"accuracy": accuracy}


def test_the_harness_asks_the_same():
    """Prompts, ends and caps of its YAML files."""
    folder = Path(pytest.importorskip("lm_eval.tasks").__file__).parent
    aime, math = (folder / name for name in ("aime/aime25.yaml", "hendrycks_math/hendrycks_math_algebra.yaml"))
    for path, task in ((aime, TASKS["aime25"]), (math, TASKS["math500"])):
        text = path.read_text(encoding="utf-8")
        assert f'doc_to_text: "{task.begins} {{{{problem}}}}\\nAnswer:"' in text
        assert f'- "{task.begins}"' in text
    assert f"max_gen_toks: {TASKS['aime25']().max_new_tokens}" in aime.read_text(encoding="utf-8")
