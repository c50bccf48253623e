"""MMBench: vanilla and circular accuracy in all readings."""

import pytest

from subtoken_train.evaluation.metrics.choices import MMBenchScores
from tests.support.vqa_cases import expected_scores, real_answers, reference_cases


def scores_of(rows):
    metric = MMBenchScores()
    metric.update([prediction for prediction, _ in rows], [reference for _, reference in rows])
    return {name: value.item() for name, value in metric.compute().items()}


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


def test_reference_rotations(shared):
    cases = [case for case in reference_cases(shared, "mmbench") if case["kind"] == "circular"]
    for case in cases:
        rows = [
            (
                row["prediction"],
                reference(row["index"], row["answer"], {k: row[k] for k in "ABCD" if known(row.get(k))}),
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
