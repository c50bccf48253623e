"""Records of ``evaluate --out`` as scores with intervals."""

from __future__ import annotations

import json

import pytest

from subtoken_train.artifact.card import model_index, score_table
from subtoken_train.evaluation.intervals import bootstrap_interval
from subtoken_train.evaluation.runner.data_file import read_scores


def run(arm, **changes):
    plain = {
        "arm": arm,
        "visual_tokens": "16/64",
        "groups": "S16K4 linear",
        "eviction": "-",
        "nominal_kv": 0.15625,
        "realised_kv": 0.15625,
        "kv_bytes": 25,
        "dense_kv_bytes": 100,
        "data": "dev.json",
        "data_sha256": "ab",
        "kinds": ["color", "list", "color", "color"],
        "scores": [1.0, 0.5, 0.0, 1.0],
    }
    return {**plain, **changes}


def written(tmp_path, *runs):
    path = tmp_path / "m.json"
    path.write_text(json.dumps({"runs": runs}))
    return path


def test_scores_by_kind(tmp_path):
    evaluation = read_scores(written(tmp_path, run("other"), run("mine")), "mine")
    assert (evaluation.data, evaluation.digest) == ("dev.json", "ab")
    assert [arm.name for arm in (evaluation.own, *evaluation.others)] == ["mine", "other"]
    together, color, listed = evaluation.own.scores
    assert (together.kind, together.metric, together.questions, together.mean) == ("all", "score", 4, 0.625)
    assert (color.metric, color.questions, color.mean) == ("exact_match", 3, 2 / 3)
    assert (color.low, color.high) == bootstrap_interval([1.0, 0.0, 1.0])
    assert (listed.metric, listed.questions) == ("f1", 1)
    assert evaluation.own.facts["KV bytes, text and index included"] == "25.000%"


def test_the_kind_of_a_scene_on_other_answers_is_an_exact_match(tmp_path):
    measures = {"log_likelihood": [-0.5, -1.5, -0.25, -0.75]}  # no F1 of an attribute: no reference describes a scene
    scores = read_scores(written(tmp_path, run("mine", measures=measures)), "mine").own.scores
    assert [score.metric for score in scores[:3]] == ["exact_match"] * 3


def test_one_kind_is_not_said_twice(tmp_path):
    path = written(tmp_path, run("mine", kinds=["color"] * 4))
    assert [score.kind for score in read_scores(path, "mine").own.scores] == ["color"]


@pytest.mark.parametrize("change", [{"data_sha256": "cd"}, {"kinds": ["color"] * 4}, {"data": "test.json"}])
def test_arms_that_answered_other_questions(tmp_path, change):
    with pytest.raises(ValueError, match="answered different questions; evaluate them in one call"):
        read_scores(written(tmp_path, run("mine"), run("other", **change)), "mine")


def test_an_arm_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"unknown arm of .*m.json 'mina'. Did you mean 'mine'\?"):
        read_scores(written(tmp_path, run("mine")), "mina")


def test_measures_follow_the_scores(tmp_path):
    measures = {"digit_f1": [None, 0.25, None, None], "log_likelihood": [-0.5, -1.5, -0.25, -0.75]}
    older = run("older")  # a record from before there were measures
    evaluation = read_scores(written(tmp_path, run("mine", measures=measures), older), "mine")
    assert [score.metric for score in evaluation.own.scores[-2:]] == ["log_likelihood", "digit_f1"]
    likelihood, digits = evaluation.own.scores[-2:]
    assert (likelihood.kind, likelihood.questions, likelihood.mean) == ("all", 4, -0.75)
    assert (digits.kind, digits.questions, digits.mean) == ("list", 1, 0.25)
    low, high = bootstrap_interval(measures["log_likelihood"])
    table = score_table(evaluation).splitlines()
    assert f"| all (4, log_likelihood) | -0.750 [{low:.3f}, {high:.3f}] |  |" in table
    assert "| list (1, digit_f1) | 25.0 [25.0, 25.0] |  |" in table
    together = evaluation.own.scores[0].cell
    assert f"| all (4, score) | {together} | {together} |" in table
    results = {result.metric_type: result.metric_value for result in model_index(evaluation, "task")}
    assert (results["log_likelihood"], results["digit_f1"]) == (-0.75, 25.0)


@pytest.mark.parametrize(
    ("measures", "words"),
    [
        *(({"digit_f1": figures}, "must have a figure or null") for figures in ([0.5], [None] * 4, [0.5] * 5)),
        ({"a | b": [0.5] * 4}, "'a | b' is no name of a measure"),
        ([], r"measures is \[\]; it must be"),
        ({"digit_f1": [True] * 4}, r"measures.digit_f1\[0\] is"),
    ],
)
def test_measures_that_do_not_fit(tmp_path, measures, words):
    with pytest.raises(ValueError, match=words):
        read_scores(written(tmp_path, run("mine", measures=measures)), "mine")
