"""POPE's and MME's scores, beside their own programs and lmms-eval."""

import random

import pytest

from subtoken_train.evaluation.tasks.yes_no import (
    MME_SUBTASKS,
    MMEScores,
    POPEScores,
    bare_answer,
    begun_answer,
    first_sentence_answer,
    official_answer,
)
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
    return metric.compute()


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
        else:
            assert {name: scores[ours] for name, ours in LLAVA.items()} == pytest.approx(
                {name: llava[name] for name in LLAVA}, abs=1e-6
            )
        for name in ("accuracy", "precision", "recall", "f1"):
            assert scores[f"lmms_{name}"] == pytest.approx(lmms[name], abs=1e-6)
        assert scores["lmms_yes_ratio"] == pytest.approx(lmms["yes_ratio_as_coded"], abs=1e-6)


def test_real_answers_of_llava(shared):
    rows, expected = real_answers(shared, "pope_llava15_13b"), expected_scores(shared, "pope_llava15_13b")
    scores = scores_of(*([row[name] for row in rows] for name in ("pred", "label", "category")))
    for name in ("adversarial", "popular", "random"):
        assert scores[f"accuracy_{name}"] == pytest.approx(expected[name]["Accuracy"], abs=1e-6)
        assert scores[f"f1_{name}"] == pytest.approx(expected[name]["F1 score"], abs=1e-6)
    assert scores["llava_f1"] == pytest.approx(expected["mean_f1"], abs=1e-6)
    assert scores["accuracy"] == pytest.approx(expected["overall_accuracy"], abs=1e-6)


def mme_scores_of(rows):
    metric = MMEScores()
    metric.update([row["pred"] for row in rows], [reference_of(row) for row in rows])
    return metric.compute()


def reference_of(row):
    return {"answer": row["answer"].lower(), "category": row["category"], "pair": row["question_id"]}


@pytest.mark.parametrize(
    ("text", "official", "lmms"),
    [
        ("Yes", "yes", "yes"),
        ("no.", "no", "no"),
        ("N", "other", "no"),
        ("y.", "other", "yes"),
        ("    yes", "other", "yes"),
        ("none", "no", "no"),
        ("eyes", "yes", "yes"),
        ("I know", "other", "other"),
        ("", "other", "other"),
    ],
)
def test_what_an_mme_answer_means(text, official, lmms):
    assert (official_answer(text), begun_answer(text)) == (official, lmms)


def test_points_of_pairs():
    pair = [("count/1", "yes", "yes"), ("count/1", "no", "no"), ("count/2", "yes", "yes"), ("count/2", "yes", "no")]
    rows = [{"category": "count", "question_id": name, "pred": p, "answer": a} for name, p, a in pair]
    scores = mme_scores_of(rows)
    assert scores["accuracy"] == 0.75
    assert scores["official_count"] == scores["lmms_perception"] == 75 + 50
    assert "official_cognition" not in scores
    alone = mme_scores_of(rows[:3])
    assert alone["accuracy"] == 1
    assert alone["official_perception"] == 200
    assert {"official_count", "official_perception", "lmms_perception"} <= MMEScores.points
    assert "accuracy" not in MMEScores.points


def test_reference_set(shared):
    lines = reference_cases(shared, "mme")
    for case, total in zip(lines[::2], lines[1::2], strict=True):
        items = case["items"]
        for item in items:
            assert begun_answer(item["pred"]) == item["lmms_parsed"]
            assert MMEScores.score(item["pred"], reference_of(item)) == item["lmms_score"]
        random.Random(0).shuffle(items)
        scores, official = mme_scores_of(items), total["official_calculation_py"]
        expected = {f"official_{name}": official["per_task"][name] for name in MME_SUBTASKS}
        expected |= {f"official_{name}": official[name] for name in ("perception", "cognition")}
        expected |= {f"lmms_{name}": total["lmms_eval"][f"mme_{name}_score"] for name in ("perception", "cognition")}
        expected["accuracy"] = total["plain_accuracy_lmms_parse"]
        assert {name: scores[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_real_mme_answers_of_llava(shared):
    rows, expected = real_answers(shared, "mme_llava15_7b"), expected_scores(shared, "mme_llava15_7b")
    scores, official = mme_scores_of(rows), expected["official_calculation_py"]
    assert len(rows) == expected["rows"]
    assert scores["accuracy"] == pytest.approx(expected["plain_accuracy"], abs=1e-6)
    for name in ("perception", "cognition"):
        assert scores[f"official_{name}"] == pytest.approx(official[name], abs=1e-6)
    for name in MME_SUBTASKS:
        assert scores[f"official_{name}"] == pytest.approx(official["per_task"][name], abs=1e-6)
