"""Records of ``evaluate --out`` as scores with intervals."""

from __future__ import annotations

import json

import pytest

from subtoken_train.evaluation.intervals import bootstrap_interval
from subtoken_train.evaluation.scores_file import read_scores


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
