"""Which option or yes and no an answer names: MMBench, ScienceQA, POPE and MME, beside their own programs."""

import random

import pytest

from subtoken_train.evaluation.tasks import image_questions, yes_no
from subtoken_train.evaluation.tasks import multiple_choice as choices
from tests.support.benchmark_folders import expected_scores, real_answers, reference_cases

OPTIONS = {"A": "cat", "B": "red dog", "C": "house"}


@pytest.mark.parametrize(
    ("text", "plain", "vlmevalkit"),
    [
        ("B", "B", "B"), ("(C).", "C", "C"), ("B. red dog", "B", "B"), ("a", None, None), ("D", None, None),
        ("A red dog", None, "A"), ("A big red dog", None, "A"), ("a red dog", None, "B"),
        ("The answer is A", None, "A"),
        ("I can see the answer: B, and the reasons are many", None, None), ("**C**", None, "C"), ("Z", None, "Z"),
        ("A cat or B", None, "A"), ("Cannot determine the answer", None, "Z"), ("", None, None),
    ],
)  # fmt: skip
def test_known_answers(text, plain, vlmevalkit):
    assert [read(text, OPTIONS) for read in choices.READINGS.values()] == [plain, vlmevalkit]


def test_the_most_telling_place_wins():
    texts = ("maybe A: no, (B) it is not", "take A. not (C) now", "Option A. or B", "none")
    assert [image_questions.best_placed_letter(text, "ABCD") for text in texts] == ["B", "C", "B", None]


def test_reference_answers(shared):
    cases = [case for case in reference_cases(shared, "mmbench") if case["kind"] == "match"]
    assert cases
    for case in cases:
        assert (choices.vlmevalkit_letter(case["pred"], case["choices"]) or False) == case["vlmevalkit_can_infer"]


def scores_of(rows):
    metric = choices.MMBenchScores()
    metric.update([prediction for prediction, _ in rows], [reference for _, reference in rows])
    return metric.compute()


def reference(index, answer, options):
    return {"index": index, "answer": answer, "options": options}


def test_all_rotations_must_be_right():
    options = {"A": "cat", "B": "dog"}
    asked = (("A", 7, "A"), ("B.", 1_000_007, "B"), ("A", 8, "A"), ("A", 1_000_008, "B"))
    rows = [(said, reference(index, answer, options)) for said, index, answer in asked]
    scores = scores_of(rows)
    assert (scores["accuracy"], scores["unrotated_accuracy"], scores["circular"]) == (0.75, 1, 0.5)
    assert "unrotated_accuracy" not in scores_of(rows[1::2])
    assert choices.MMBenchScores.score("B.", rows[1][1]) == 1
    assert "circular" not in scores_of(rows[::2])


@pytest.mark.slow
def test_real_answers_of_llava(shared):
    expected = expected_scores(shared, "mmbench_dev_20230712_llava15_13b")
    rows = [
        (line["pred"], reference(line["index"], line["answer"], dict.fromkeys("ABCD"[: line["n_options"]], "?")))
        for line in real_answers(shared, "mmbench_dev_llava15_13b")
    ]
    scores = scores_of(rows)
    for reading in ("", "vlmevalkit_"):
        assert scores[f"{reading}accuracy"] == pytest.approx(expected["vanilla_over_all_rows"], abs=1e-6)
        assert scores[f"{reading}circular"] == pytest.approx(expected["circular"], abs=1e-6)


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"), ("B. dogs", "B"), ("b", None), ("B.", None), ("The answer is B.", "B"), ("The answer is B", None),
        ("The answer is B. The answer is C.", None), ("", None), ("\nB", None), (" B. dogs", None), ("B\n.", None),
    ],
)  # fmt: skip
def test_what_an_answer_means(text, letter):
    assert choices.llava_letter(text) == letter


def test_a_letter_beyond_the_choices_is_wrong():
    assert choices.llava_choice("C", 2) == -1
    assert choices.ScienceQAScores.score("C", {"answer": 1, "choices": 2, "image": True}) == 0


def test_reference_items(shared):
    cases = reference_cases(shared, "scienceqa")
    items = [case for case in cases if case["kind"] == "item"]
    aggregates = [case for case in cases if case["kind"] == "aggregate"]
    assert items
    for item in items:
        assert (choices.llava_letter(item["pred"]) or "FAILED") == item["llava_parsed_ans"]
        assert choices.llava_choice(item["pred"], len(item["choices"])) == item["llava_pred_idx"]
    metric = choices.ScienceQAScores()
    references = [{"answer": i["answer"], "choices": len(i["choices"]), "image": i["image"]} for i in items]
    metric.update([item["pred"] for item in items], references)
    scores = metric.compute()
    # one question more was never answered, and their program counts it as wrong
    assert scores["accuracy"] * len(items) == pytest.approx(sum(case["correct"] for case in aggregates), abs=1e-6)
    if len(aggregates) == 1:
        assert f"IMG-Accuracy: {100 * scores['llava_image_accuracy']:.2f}%" in aggregates[0]["stdout"]


LLAVA = {
    "Accuracy": "accuracy", "Precision": "precision", "Recall": "recall", "F1 score": "f1", "Yes ratio": "yes_rate",
}  # fmt: skip


def pope_scores_of(answers, labels, categories):
    metric = yes_no.POPEScores()
    metric.update(answers, [{"label": label, "category": name} for label, name in zip(labels, categories, strict=True)])
    return metric.compute()


@pytest.mark.parametrize(
    ("text", "llava"),
    [
        ("No", "no"), ("yes", "yes"), ("Yes.", "yes"), (" no ", "no"), ("There is, not one", "no"), ("", "yes"),
        ("It is. No", "yes"), ("NO", "yes"), ("\nno", "yes"), ("isn't", "yes"),
    ],
)  # fmt: skip
def test_what_a_pope_answer_means(text, llava):
    assert yes_no.first_sentence_answer(text) == llava
    assert yes_no.POPEScores.score(text, {"label": llava, "category": "random"}) == 1


def test_known_counts():
    answers, labels = ["yes", "yes", "no", "no", "Yes!"], ["yes", "no", "yes", "no", "yes"]
    scores = pope_scores_of(answers, labels, ["random", "random", "popular", "popular", "popular"])
    wanted = {"accuracy": 3 / 5, "precision": 2 / 3, "recall": 2 / 3, "yes_rate": 3 / 5, "accuracy_random": 1 / 2}
    wanted |= {"f1_popular": 2 / 3, "llava_f1": (2 / 3 + 2 / 3) / 2}
    assert {name: scores[name] for name in wanted} == pytest.approx(wanted)
    assert "accuracy_adversarial" not in scores


def test_reference_batches(shared):
    for case in reference_cases(shared, "pope"):
        texts, labels = [item["text"] for item in case["items"]], [item["label"] for item in case["items"]]
        llava = case["llava_eval_pope"]
        assert [yes_no.first_sentence_answer(text) for text in texts] == llava["per_item_pred"]
        scores = pope_scores_of(texts, labels, ["random"] * len(texts))
        if llava["error"]:
            assert llava["error"] == "ZeroDivisionError"
            assert scores["f1"] == 0
            assert scores["accuracy"] == pytest.approx((llava["TP"] + llava["TN"]) / len(texts))
        else:
            wanted = {ours: llava[name] for name, ours in LLAVA.items()}
            assert {name: scores[name] for name in wanted} == pytest.approx(wanted, abs=1e-6)


def test_real_pope_answers_of_llava(shared):
    rows, expected = real_answers(shared, "pope_llava15_13b"), expected_scores(shared, "pope_llava15_13b")
    scores = pope_scores_of(*([row[name] for row in rows] for name in ("pred", "label", "category")))
    for name in ("adversarial", "popular", "random"):
        assert scores[f"accuracy_{name}"] == pytest.approx(expected[name]["Accuracy"], abs=1e-6)
        assert scores[f"f1_{name}"] == pytest.approx(expected[name]["F1 score"], abs=1e-6)
    assert scores["llava_f1"] == pytest.approx(expected["mean_f1"], abs=1e-6)
    assert scores["accuracy"] == pytest.approx(expected["overall_accuracy"], abs=1e-6)


def mme_scores_of(rows):
    metric = yes_no.MMEScores()
    metric.update([row["pred"] for row in rows], [reference_of(row) for row in rows])
    return metric.compute()


def reference_of(row):
    return {"answer": row["answer"].lower(), "category": row["category"], "pair": row["question_id"]}


@pytest.mark.parametrize(
    ("text", "official", "lmms"),
    [
        ("Yes", "yes", "yes"), ("no.", "no", "no"), ("N", "other", "no"), ("y.", "other", "yes"),
        ("    yes", "other", "yes"), ("none", "no", "no"), ("eyes", "yes", "yes"), ("I know", "other", "other"),
        ("", "other", "other"),
    ],
)  # fmt: skip
def test_what_an_mme_answer_means(text, official, lmms):
    assert (yes_no.official_answer(text), yes_no.begun_answer(text)) == (official, lmms)


def test_points_of_pairs():
    pair = [("count/1", "yes", "yes"), ("count/1", "no", "no"), ("count/2", "yes", "yes"), ("count/2", "yes", "no")]
    rows = [{"category": "count", "question_id": name, "pred": p, "answer": a} for name, p, a in pair]
    scores = mme_scores_of(rows)
    assert scores["accuracy"] == 0.75
    assert scores["official_count"] == scores["official_perception"] == 75 + 50
    assert "official_cognition" not in scores
    alone = mme_scores_of(rows[:3])
    assert alone["accuracy"] == 1
    assert alone["official_perception"] == 200
    assert {"official_count", "official_perception"} <= yes_no.MMEScores.points
    assert "accuracy" not in yes_no.MMEScores.points


def test_reference_set(shared):
    lines = reference_cases(shared, "mme")
    for case, total in zip(lines[::2], lines[1::2], strict=True):
        items = case["items"]
        for item in items:
            assert yes_no.begun_answer(item["pred"]) == item["lmms_parsed"]
            assert yes_no.MMEScores.score(item["pred"], reference_of(item)) == item["lmms_score"]
        random.Random(0).shuffle(items)
        scores, official = mme_scores_of(items), total["official_calculation_py"]
        expected = {f"official_{name}": official["per_task"][name] for name in yes_no.MME_SUBTASKS}
        expected |= {f"official_{name}": official[name] for name in ("perception", "cognition")}
        expected["accuracy"] = total["plain_accuracy_lmms_parse"]
        assert {name: scores[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_real_mme_answers_of_llava(shared):
    rows, expected = real_answers(shared, "mme_llava15_7b"), expected_scores(shared, "mme_llava15_7b")
    scores, official = mme_scores_of(rows), expected["official_calculation_py"]
    assert len(rows) == expected["rows"]
    assert scores["accuracy"] == pytest.approx(expected["plain_accuracy"], abs=1e-6)
    for name in ("perception", "cognition"):
        assert scores[f"official_{name}"] == pytest.approx(official[name], abs=1e-6)
    for name in yes_no.MME_SUBTASKS:
        assert scores[f"official_{name}"] == pytest.approx(official["per_task"][name], abs=1e-6)
