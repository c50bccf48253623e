"""Which option an answer names, and MMBench's and ScienceQA's scores."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.evaluation.metrics.choices import (
    LETTERS,
    MMBenchScores,
    ScienceQAScores,
    llava_choice,
    llava_letter,
    lmms_letter,
    lmms_right,
    lmms_static_letter,
    plain_letter,
    vlmevalkit_letter,
)
from tests.support.vqa_cases import expected_scores, real_answers, reference_cases

OPTIONS = {"A": "cat", "B": "red dog", "C": "house"}


@pytest.mark.parametrize(
    ("text", "plain", "lmms", "static", "vlmevalkit"),
    [
        ("B", "B", "B", "B", "B"),
        ("(C).", "C", "C", "C", "C"),
        ("B. red dog", "B", "B", "B", "B"),
        ("a", None, None, None, None),
        ("D", None, "D", "D", None),
        ("A red dog", None, "A", "A", "A"),
        ("A big red dog", None, "B", "B", "A"),
        ("a red dog", None, "B", "B", "B"),
        ("The answer is A", None, None, "A", "A"),
        ("I can see the answer: B, and the reasons are many", None, "B", "B", None),
        ("**C**", None, None, "C", "C"),
        ("A cat or B", None, "A", "A", "A"),
        ("Z", None, None, None, "Z"),
        ("Cannot determine the answer", None, None, "C", "Z"),  # the static task's last resort: a C in any word
        ("", None, None, None, None),
    ],
)
def test_known_answers(text, plain, lmms, static, vlmevalkit):
    found = plain_letter(text, OPTIONS), lmms_letter(text, OPTIONS), lmms_static_letter(text, OPTIONS)
    assert (*found, vlmevalkit_letter(text, OPTIONS)) == (plain, lmms, static, vlmevalkit)


def test_reference_answers(shared):
    cases = [case for case in reference_cases(shared, "mmbench") if case["kind"] == "match"]
    assert cases
    for case in cases:
        assert (lmms_letter(case["pred"], case["choices"]) or False) == case["lmms_can_infer"]
        assert (vlmevalkit_letter(case["pred"], case["choices"]) or False) == case["vlmevalkit_can_infer"]


def scores_of(rows):
    metric = MMBenchScores()
    metric.update([prediction for prediction, _ in rows], [reference for _, reference in rows])
    return metric.compute()


def reference(index, answer, options):
    return {"index": index, "answer": answer, "options": options}


def test_all_rotations_must_be_right():
    options = {"A": "cat", "B": "dog"}
    rows = [
        ("A", reference(7, "A", options)),
        ("B.", reference(1_000_007, "B", options)),
        ("A", reference(8, "A", options)),
        ("A", reference(1_000_008, "B", options)),
    ]
    scores = scores_of(rows)
    assert (scores["accuracy"], scores["unrotated_accuracy"], scores["circular"]) == (0.75, 1, 0.5)
    assert "unrotated_accuracy" not in scores_of(rows[1::2])
    assert MMBenchScores.score("B.", rows[1][1]) == 1
    assert "circular" not in scores_of(rows[::2])


def test_readings_are_not_mixed():
    scores = scores_of([("the dog", reference(1, "B", {"A": "cat", "B": "dog"}))])
    assert scores["accuracy"] == 0
    assert scores["lmms_accuracy"] == scores["lmms_static_accuracy"] == scores["vlmevalkit_accuracy"] == 1


@pytest.mark.parametrize(
    ("text", "nan", "lmms", "static"),
    [
        ("a banana", "", "", ""),
        ("a banana", "D", "D", "D"),  # lmms-eval: the one option whose text the answer contains
        ("a banana", "CD", "", ""),
        ("a banana and a cat", "D", "", ""),  # two texts are contained
        ("a banana and a cat", "", "A", "A"),
        ("It must be (D)!", "", "", ""),
        ("It must be (D)!", "D", "", "D"),  # a letter is looked for among all options, "nan" too
    ],
)
def test_options_of_the_text_nan_count_for_lmms_eval_alone(text, nan, lmms, static):
    options = {"A": "cat", "B": "dog"}
    for letter in "ABCD":
        scores = scores_of([(text, {"index": 1, "answer": letter, "options": options, "nan_options": nan})])
        assert scores["lmms_accuracy"] == (letter == lmms)
        assert scores["lmms_static_accuracy"] == (letter == static)
        plain = [plain_letter(text, options), vlmevalkit_letter(text, options)]
        assert [scores["accuracy"], scores["vlmevalkit_accuracy"]] == [letter == found for found in plain]


def test_reference_rotations(shared):
    cases = [case for case in reference_cases(shared, "mmbench") if case["kind"] == "circular"]
    for case in cases:
        rows = [
            (
                row["prediction"],
                {
                    **reference(row["index"], row["answer"], {k: row[k] for k in "ABCD" if known(row.get(k))}),
                    "nan_options": [letter for letter in "ABCD" if row.get(letter) == "nan"],
                },
            )
            for row in case["rows"]
        ]
        scores = scores_of(rows)
        assert scores["lmms_static_circular"] == pytest.approx(case["lmms_static_circular_overall"], abs=1e-6)
        vanilla = case["vanilla_accuracy_over_all_rows_lmms_can_infer"]
        assert scores["lmms_accuracy"] == pytest.approx(vanilla, abs=1e-6)
        unrotated = case["vanilla_accuracy_index_lt_1e6"]
        assert scores["lmms_unrotated_accuracy"] == pytest.approx(unrotated, abs=1e-6)
        for category, expected in case["per_category"].items():
            own = [pair for pair, row in zip(rows, case["rows"], strict=True) if row["category"] == category]
            assert scores_of(own)["lmms_static_circular"] == pytest.approx(expected, abs=1e-6)
    assert cases


def known(option):
    return option not in (None, "nan")


@pytest.mark.slow
def test_real_answers_of_llava(shared):
    lines = real_answers(shared, "mmbench_dev_llava15_13b")
    expected = expected_scores(shared, "mmbench_dev_20230712_llava15_13b")
    rows = [
        (line["pred"], reference(line["index"], line["answer"], dict.fromkeys("ABCD"[: line["n_options"]], "?")))
        for line in lines
    ]
    scores = scores_of(rows)
    for reading in ("", "lmms_", "lmms_static_", "vlmevalkit_"):
        assert scores[f"{reading}accuracy"] == pytest.approx(expected["vanilla_over_all_rows"], abs=1e-6)
        assert scores[f"{reading}circular"] == pytest.approx(expected["circular"], abs=1e-6)


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
        ("\nB", None, True),  # LLaVA's program reads no letter after a line break, lmms-eval's does
        ("B\n", None, True),
        (" B. dogs", None, True),
        ("\nB. dogs", None, True),
        ("\n\nB.\ndogs", None, True),
        ("\nb. dogs", None, False),
        ("B\n.", None, False),
        ("The answer is\nB.", None, False),
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
    assert items
    for item in items:
        assert (llava_letter(item["pred"]) or "FAILED") == item["llava_parsed_ans"]
        assert llava_choice(item["pred"], len(item["choices"])) == item["llava_pred_idx"]
        assert lmms_right(item["pred"], LETTERS[item["answer"]]) == item["lmms_exact_match"]
    metric = ScienceQAScores()
    references = [{"answer": i["answer"], "choices": len(i["choices"]), "image": i["image"]} for i in items]
    metric.update([item["pred"] for item in items], references)
    scores = metric.compute()
    # one question more was never answered, and their program counts it as wrong
    assert scores["accuracy"] * len(items) == pytest.approx(sum(case["correct"] for case in aggregates), abs=1e-6)
    if len(aggregates) == 1:
        assert f"IMG-Accuracy: {100 * scores['llava_image_accuracy']:.2f}%" in aggregates[0]["stdout"]
    lmms = sum(item["lmms_exact_match"] for item in items) / len(items)
    assert scores["lmms_accuracy"] == pytest.approx(lmms, abs=1e-6)


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from("ABZ")), min_size=1, max_size=20))
def test_circular_is_never_above_vanilla_of_whole_groups(rows):
    """Every question has two rows, so a question counts for both scores alike."""
    metric = MMBenchScores()
    rows = dict(rows).items()
    for question, letter in rows:
        for rotation in (0, 1_000_000):
            reference = {"index": question + rotation, "answer": "A", "options": {"A": "cat", "B": "dog"}}
            metric.update(["A" if rotation else letter], [reference])
    scores = metric.compute()
    assert scores["circular"] <= scores["accuracy"]
    assert scores["circular"] == sum(letter == "A" for _, letter in rows) / len(rows)
