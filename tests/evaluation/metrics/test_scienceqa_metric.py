"""ScienceQA: equal to LLaVA's and lmms-eval's programs."""

import pytest

from subtoken_train.evaluation.metrics.choices import LETTERS, ScienceQAScores, llava_choice, llava_letter, lmms_right
from tests.support.vqa_cases import reference_cases


@pytest.mark.parametrize(
    ("text", "letter", "lmms"),
    [
        ("B", "B", True),
        ("B. dogs", "B", True),
        ("b", None, True),
        ("B.", None, True),
        ("The answer is B.", "B", False),
        ("The answer is B", None, False),
        ("The answer is B. The answer is C.", None, False),
        ("", None, False),
    ],
)
def test_what_an_answer_means(text, letter, lmms):
    assert llava_letter(text) == letter
    assert lmms_right(text, "B") is lmms


def test_a_letter_beyond_the_choices_is_wrong():
    assert llava_choice("C", 2) == -1
    assert ScienceQAScores.score("C", {"answer": 1, "choices": 2, "image": True}) == 0


def test_reference_items(shared):
    cases = reference_cases(shared, "scienceqa")
    items = [case for case in cases if case["kind"] == "item"]
    aggregates = [case for case in cases if case["kind"] == "aggregate"]
    assert len(items) >= 300
    for item in items:
        assert (llava_letter(item["pred"]) or "FAILED") == item["llava_parsed_ans"]
        assert llava_choice(item["pred"], len(item["choices"])) == item["llava_pred_idx"]
        assert lmms_right(item["pred"], LETTERS[item["answer"]]) == item["lmms_exact_match"]
    metric = ScienceQAScores()
    references = [{"answer": i["answer"], "choices": len(i["choices"]), "image": i["image"]} for i in items]
    metric.update([item["pred"] for item in items], references)
    scores = metric.compute()
    # one question more was never answered, and their program counts it as wrong
    assert scores["accuracy"].item() * len(items) == pytest.approx(
        sum(case["correct"] for case in aggregates), abs=1e-6
    )
    if len(aggregates) == 1:
        assert f"IMG-Accuracy: {100 * scores['llava_image_accuracy'].item():.2f}%" in aggregates[0]["stdout"]
    lmms = sum(item["lmms_exact_match"] for item in items) / len(items)
    assert scores["lmms_accuracy"].item() == pytest.approx(lmms, abs=1e-6)
