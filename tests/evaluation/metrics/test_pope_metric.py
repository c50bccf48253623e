"""POPE: equal to LLaVA's and lmms-eval's programs, also where the former stops."""

import pytest

from subtoken_train.evaluation.metrics.yes_no import POPEScores, bare_answer, first_sentence_answer
from tests.support.vqa_cases import expected_scores, real_answers, reference_cases

LLAVA = {
    "Accuracy": "accuracy",
    "Precision": "precision",
    "Recall": "recall",
    "F1 score": "f1",
    "Yes ratio": "yes_rate",
}


def scores_of(answers, labels, categories):
    metric = POPEScores()
    references = [{"label": label, "category": name} for label, name in zip(labels, categories, strict=True)]
    metric.update(answers, references)
    return {name: value.item() for name, value in metric.compute().items()}


@pytest.mark.parametrize(
    ("text", "llava", "lmms"),
    [
        ("No", "no", "no"),
        ("yes", "yes", "yes"),
        ("Yes.", "yes", "yes."),
        (" no ", "no", "no"),
        ("There is, not one", "no", "there is, not one"),
        ("It is. No", "yes", "it is. no"),
        ("", "yes", ""),
        ("NO", "yes", "no"),
        ("\nno", "yes", "no"),
        ("isn't", "yes", "isn't"),
    ],
)
def test_what_an_answer_means(text, llava, lmms):
    assert (first_sentence_answer(text), bare_answer(text)) == (llava, lmms)
    assert POPEScores.score(text, {"label": llava, "category": "random"}) == 1


def test_known_counts():
    answers, labels = ["yes", "yes", "no", "no", "Yes!"], ["yes", "no", "yes", "no", "yes"]
    scores = scores_of(answers, labels, ["random", "random", "popular", "popular", "popular"])
    assert scores["accuracy"] == pytest.approx(3 / 5)
    assert scores["precision"] == pytest.approx(2 / 3)
    assert scores["recall"] == pytest.approx(2 / 3)
    assert scores["yes_rate"] == pytest.approx(3 / 5)
    assert scores["accuracy_random"] == pytest.approx(1 / 2)
    assert scores["f1_popular"] == pytest.approx(2 / 3)
    assert scores["llava_f1"] == pytest.approx((2 / 3 + 2 / 3) / 2)
    assert scores["lmms_accuracy"] == pytest.approx(2 / 5)
    assert scores["lmms_recall"] == pytest.approx(1 / 2)  # "Yes!" is no missed yes there
    assert "accuracy_adversarial" not in scores


def test_reference_batches(shared):
    cases = reference_cases(shared, "pope")
    assert len(cases) >= 24
    stopped = 0
    for case in cases:
        texts, labels = [item["text"] for item in case["items"]], [item["label"] for item in case["items"]]
        llava, lmms = case["llava_eval_pope"], case["lmms_eval_pope"]
        assert [first_sentence_answer(text) for text in texts] == llava["per_item_pred"]
        hits = [float(bare_answer(text) == label) for text, label in zip(texts, labels, strict=True)]
        assert hits == lmms["per_item_score"]
        scores = scores_of(texts, labels, ["random"] * len(texts))
        if llava["error"]:
            assert llava["error"] == "ZeroDivisionError"
            assert scores["f1"] == 0
            assert scores["accuracy"] == pytest.approx((llava["TP"] + llava["TN"]) / len(texts))
            stopped += 1
        else:
            assert {name: scores[ours] for name, ours in LLAVA.items()} == pytest.approx(
                {name: llava[name] for name in LLAVA}, abs=1e-6
            )
        for name in ("accuracy", "precision", "recall", "f1"):
            assert scores[f"lmms_{name}"] == pytest.approx(lmms[name], abs=1e-6)
        assert scores["lmms_yes_ratio"] == pytest.approx(lmms["yes_ratio_as_coded"], abs=1e-6)
    assert stopped


def test_real_answers_of_llava(shared):
    rows, expected = real_answers(shared, "pope_llava15_13b"), expected_scores(shared, "pope_llava15_13b")
    scores = scores_of(*([row[name] for row in rows] for name in ("pred", "label", "category")))
    for name in ("adversarial", "popular", "random"):
        assert scores[f"accuracy_{name}"] == pytest.approx(expected[name]["Accuracy"], abs=1e-6)
        assert scores[f"f1_{name}"] == pytest.approx(expected[name]["F1 score"], abs=1e-6)
    assert scores["llava_f1"] == pytest.approx(expected["mean_f1"], abs=1e-6)
    assert scores["accuracy"] == pytest.approx(expected["overall_accuracy"], abs=1e-6)
