"""MME: equal to its own program and to lmms-eval, with pairs found by name."""

import random

import pytest

from subtoken_train.evaluation.metrics.yes_no import MME_SUBTASKS, MMEScores, begun_answer, official_answer
from tests.support.vqa_cases import expected_scores, real_answers, reference_cases


def scores_of(rows):
    metric = MMEScores()
    metric.update([row["pred"] for row in rows], [reference_of(row) for row in rows])
    return {name: value.item() for name, value in metric.compute().items()}


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
def test_what_an_answer_means(text, official, lmms):
    assert (official_answer(text), begun_answer(text)) == (official, lmms)


def test_points_of_pairs():
    pair = [("count/1", "yes", "yes"), ("count/1", "no", "no"), ("count/2", "yes", "yes"), ("count/2", "yes", "no")]
    rows = [{"category": "count", "question_id": name, "pred": p, "answer": a} for name, p, a in pair]
    scores = scores_of(rows)
    assert scores["accuracy"] == 0.75
    assert scores["official_count"] == scores["lmms_perception"] == 75 + 50
    assert "official_cognition" not in scores
    alone = scores_of(rows[:3])
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
        scores, official = scores_of(items), total["official_calculation_py"]
        expected = {f"official_{name}": official["per_task"][name] for name in MME_SUBTASKS}
        expected |= {f"official_{name}": official[name] for name in ("perception", "cognition")}
        expected |= {f"lmms_{name}": total["lmms_eval"][f"mme_{name}_score"] for name in ("perception", "cognition")}
        expected["accuracy"] = total["plain_accuracy_lmms_parse"]
        assert {name: scores[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_real_answers_of_llava(shared):
    rows, expected = real_answers(shared, "mme_llava15_7b"), expected_scores(shared, "mme_llava15_7b")
    scores, official = scores_of(rows), expected["official_calculation_py"]
    assert len(rows) == expected["rows"]
    assert scores["accuracy"] == pytest.approx(expected["plain_accuracy"], abs=1e-6)
    for name in ("perception", "cognition"):
        assert scores[f"official_{name}"] == pytest.approx(official[name], abs=1e-6)
    for name in MME_SUBTASKS:
        assert scores[f"official_{name}"] == pytest.approx(official["per_task"][name], abs=1e-6)
