"""Scores of single answers."""

from __future__ import annotations

import numpy as np
import pytest

from subtoken_train.datasets.scenes import ask, draw_scene
from subtoken_train.evaluation.metrics.short_answers import scene_f1, scene_objects, scene_score


def test_short_answers_ignore_case_and_space():
    assert scene_score(None, " Red 7 ", "red 7") == 1
    assert scene_score(None, "red 7 8", "red 7") == 0
    assert scene_score(None, "", "yes") == 0


def test_both_description_styles_name_the_same_objects():
    rng = np.random.default_rng(0)
    objects = draw_scene(rng, "dev").objects
    raster, by_digit = (ask(rng, objects, kind)[1] for kind in ("describe", "list"))
    wanted = {frozenset({o.place, o.color_name, str(o.digit)}) for o in objects}
    assert scene_objects(raster) == wanted
    assert scene_objects(by_digit) == wanted


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        ("A1 red 3 B2 blue 4", 1.0),
        ("B2 blue 4 A1 red 3", 1.0),
        ("A1 red 3", 2 / 3),
        ("A1 red 3 B2 blue 5", 0.5),
        ("A1 red 3 B2 blue 4 C1 white 0", 0.8),
        ("", 0.0),
        ("red red red", 0.0),
    ],
)
def test_scene_f1(prediction, expected):
    assert scene_f1(prediction, "A1 red 3 B2 blue 4") == pytest.approx(expected)


def test_kind_chooses_the_score():
    assert scene_score("describe", "A1 red 3", "A1 red 3 B2 blue 4") == pytest.approx(2 / 3)
    assert scene_score("read", "red 3", "red 3 B2") == 0
    assert scene_score(None, "yes", "yes") == 1
