"""MATH-500 and AIME 2025: what is asked, both scorers, rows and settings that are refused."""

import json

import pytest

from subtoken_train.evaluation.runner.cell import model_inputs
from subtoken_train.evaluation.tasks import build_task, math_problems
from subtoken_train.evaluation.tasks.math_problems import MathAccuracy
from tests.support.text_families import text_family
from tests.support.vqa_cases import refused

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
        ({}, r"line 2: id 'test/prealgebra/1\.json' appears twice, first in .* line 1"),
    ],
)
def test_rows_that_cannot_be_scored(tmp_path, row, message):
    refused(message, "math500", write(tmp_path, MATH, MATH | row))


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    refused(r"has no data/test-\*\.parquet\. hf download math-ai/aime25 test\.jsonl", "aime25", tmp_path)
    monkeypatch.setattr("subtoken_train.errors.find_spec", lambda package: None)
    with pytest.raises(ValueError, match=r"needs math_verify, which is not installed: pip install 'subtoken_train\[ev"):
        build_task("math500").check_requirements()
    with pytest.raises(ValueError, match="max_new_tokens of aime25 is 0; it must be 1 to 1,048,576"):
        build_task("aime25", max_new_tokens=0)


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path):
    (sample,) = build_task("aime25", write(tmp_path, AIME), chat=True).samples()
    with pytest.raises(ValueError, match="sample '0': the tokenizer has no chat template"):
        model_inputs([sample], text_family(), "text", None)


@pytest.mark.parametrize(
    ("harness", "text", "answer", "accuracy", "exact"),
    [
        ("aime", r"Hence \boxed{70}.", "70", 1, 1),
        ("aime", "So the answer is 70.", "70", 1, 0),
        ("aime", "70", "70", 1, 1),
        ("aime", r"70 of \boxed{71}", "70", 0, 0),
        ("hendrycks_math", r"It is $\frac{1}{2}$", r"\frac{1}{2}", 1, 1),
        ("hendrycks_math", r"It is $0.5$", r"\frac{1}{2}", 1, 1),
        ("hendrycks_math", r"so $\boxed{\frac12}$", r"\frac{1}{2}", 1, 0),
        ("hendrycks_math", r"$(x-1)(x+1)$", "x^2-1", 1, 0),
        ("hendrycks_math", r"the interval $[2, 5)$", "[2,5)", 1, 1),
        ("hendrycks_math", "", "3", 0, 0),
        ("hendrycks_math", r"\boxed{", "3", 0, 0),
    ],
)
def test_both_scorers(harness, text, answer, accuracy, exact):
    pytest.importorskip("math_verify")
    reference = {"answer": answer, "solution": rf"\boxed{{{answer}}}", "harness": harness}
    assert MathAccuracy.figures(text, reference) == {"accuracy": accuracy, "lm_eval_exact_match": exact}


def test_the_harness_asks_the_same():
    """Prompts, ends and caps of its YAML files."""
    tasks = pytest.importorskip("lm_eval.tasks")
    folder = math_problems.Path(tasks.__file__).parent
    aime, math = (folder / name for name in ("aime/aime25.yaml", "hendrycks_math/hendrycks_math_algebra.yaml"))
    for path, task in ((aime, math_problems.AIME25), (math, math_problems.Math500)):
        text = path.read_text(encoding="utf-8")
        assert f'doc_to_text: "{task.begins} {{{{problem}}}}\\nAnswer:"' in text
        assert f'- "{task.begins}"' in text
    assert f"max_gen_toks: {math_problems.AIME25().max_new_tokens}" in aime.read_text(encoding="utf-8")
