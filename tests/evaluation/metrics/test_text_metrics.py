"""Log-likelihoods, matches of texts, and scenes."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.datasets.scenes import COLOR_NAMES, DESCRIPTION_KINDS, PLACES, ask, draw_scene
from subtoken_train.evaluation.tasks import embedded_tasks as embedded
from subtoken_train.evaluation.tasks.likelihoods import MultipleChoice, Perplexity
from subtoken_train.evaluation.tasks.ruler import RulerMatch, ruler_score
from tests.support.benchmark_folders import reference_cases

TEXTS = [
    ([-12.5], {"words": 5, "bytes": 31}), ([-3.25], {"words": 2, "bytes": 9}),
    ([-40.0], {"words": 11, "bytes": 60}),
]  # fmt: skip


def test_against_lm_eval():
    metrics = pytest.importorskip("lm_eval.api.metrics", reason="lm-eval is absent")
    metric = Perplexity()
    for prediction, reference in TEXTS:
        metric.update([prediction], [reference])
    words = [(likelihood, reference["words"]) for (likelihood,), reference in TEXTS]
    octets = [(likelihood, reference["bytes"]) for (likelihood,), reference in TEXTS]
    expected = {
        "word_perplexity": metrics.weighted_perplexity(words),
        "byte_perplexity": metrics.weighted_perplexity(octets),
        "bits_per_byte": metrics.bits_per_byte(octets),
    }
    assert metric.compute() == pytest.approx(expected, abs=1e-9)


def test_a_fair_coin_per_byte_is_one_bit():
    metric = Perplexity()
    metric.update([[-8 * math.log(2)]], [{"words": 2, "bytes": 8}])
    assert metric.compute() == pytest.approx({"word_perplexity": 16, "byte_perplexity": 2, "bits_per_byte": 1})
    assert Perplexity.score([-8 * math.log(2)], {"words": 2, "bytes": 8}) == pytest.approx(0.5)
    assert not Perplexity.higher_is_better
    assert Perplexity.points == set(metric.compute())


def test_the_first_of_the_likeliest_is_chosen():
    assert MultipleChoice.score([-2.0, -1.0, -1.0, -3.0], {"answer": 1}) == 1
    assert MultipleChoice.score([-2.0, -1.0, -1.0, -3.0], {"answer": 2}) == 0
    metric = MultipleChoice()
    metric.update([[-1.0, -2.0], [-1.0, -2.0], [-3.0, -2.0]], [{"answer": 0}, {"answer": 1}, {"answer": 1}])
    assert metric.compute()["accuracy"] == 2 / 3


def test_reference_items(shared):
    for case in reference_cases(shared, "mmlu"):
        score = MultipleChoice.score(case["loglikelihoods"], {"answer": case["doc"]["answer"]})
        assert score == case["lm_eval_result"]["acc"]


@pytest.fixture
def golden(shared):
    """Sets of items, each with its aggregate."""
    sets = [[]]
    for case in reference_cases(shared, "ruler"):
        sets[-1].append(case)
        if case["kind"] == "aggregate":
            sets.append([])
    assert not sets.pop()
    return sets


def test_items_of_the_golden(golden):
    items = [row for *rows, _ in golden for row in rows]
    assert items
    for row in items:
        given = row["predicted_answer"], row["task"], row["answer"]
        assert round(100 * ruler_score(*given), 2) == pytest.approx(row["ruler_score"], abs=1e-6)


def test_aggregate_of_the_golden(golden):
    for *items, aggregate in golden:
        metric = RulerMatch()
        references = [{"task": row["task"], "answers": row["answer"]} for row in items]
        metric.update([row["predicted_answer"] for row in items], references)
        scores = metric.compute()
        tasks = aggregate["ruler"]
        assert {name: round(100 * scores[name], 2) for name in tasks} == tasks
        assert scores.keys() == {"string_match", *tasks}
        assert scores["string_match"] == pytest.approx(sum(scores[name] for name in tasks) / len(tasks), abs=1e-12)


def test_parts_and_control_characters():
    assert ruler_score("ALPHA only", "vt", ["alpha", "beta"]) == 0.5
    assert ruler_score("ALPHA only", "qa_2", ["alpha", "beta"]) == 1
    assert ruler_score("ab\ncd", "qa_1", ["abcd"]) == 0


def test_tasks_weigh_alike_whatever_their_size():
    metric = RulerMatch()
    metric.update(["1", "2", "x"], [{"task": "vt", "answers": ["1"]}] * 2 + [{"task": "qa_1", "answers": ["x"]}])
    assert metric.compute()["string_match"] == 0.75


DIGITS = tuple("0123456789")
OBJECTS = st.lists(st.tuples(*map(st.sampled_from, (PLACES, COLOR_NAMES, DIGITS))), max_size=9)
"""Objects of a description; unlike a scene's, they may share a place or a digit."""


def test_both_description_styles_name_the_same_objects():
    rng = np.random.default_rng(0)
    objects = draw_scene(rng, "dev").objects
    raster, by_digit = (ask(rng, objects, kind)[1] for kind in ("describe", "list"))
    wanted = {frozenset({o.place, o.color_name, str(o.digit)}) for o in objects}
    assert embedded.scene_objects(raster) == wanted
    assert embedded.scene_objects(by_digit) == wanted


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        ("A1 red 3 B2 blue 4", 1.0), ("B2 blue 4 A1 red 3", 1.0), ("A1 red 3", 2 / 3), ("A1 red 3 B2 blue 5", 0.5),
        ("A1 red 3 B2 blue 4 C1 white 0", 0.8), ("", 0.0), ("red red red", 0.0),
    ],
)  # fmt: skip
def test_scene_f1(prediction, expected):
    assert embedded.scene_f1(prediction, "A1 red 3 B2 blue 4") == pytest.approx(expected)


def test_kind_chooses_the_score():
    """Of a description the objects count, of a short answer the text but for case and space."""
    assert embedded.scene_score("describe", "A1 red 3", "A1 red 3 B2 blue 4") == pytest.approx(2 / 3)
    assert embedded.scene_score("read", "red 3", "red 3 B2") == embedded.scene_score(None, "red 7 8", "red 7") == 0
    assert embedded.scene_score(None, "", "yes") == 0
    assert embedded.scene_score(None, "yes", "yes") == embedded.scene_score(None, " Red 7 ", "red 7") == 1


@pytest.mark.parametrize("kind", DESCRIPTION_KINDS)
@pytest.mark.parametrize(("prediction", "score"), [("a cat", 0), ("", 0), ("A Dog ", 1)])
def test_a_description_of_something_else_is_an_exact_match(kind, prediction, score):
    assert embedded.SceneScore.figures(prediction, {"kind": kind, "answer": "a dog"}) == {"score": score}


def described(objects, style):
    """Objects in the words of a style: ``describe`` in the order given, ``list`` with digits that are not there."""
    if style == "describe":
        return " ".join(f"{place} {color} {digit}" for place, color, digit in objects)
    named = {digit for _, _, digit in objects}
    there = [f"{digit} {color} {place}" for place, color, digit in objects]
    return " ".join([*there, *(f"{digit} none" for digit in DIGITS if digit not in named)])


def plain_f1(found, wanted):
    """F1 of two lists, each item matched at most once."""
    both = (Counter(found) & Counter(wanted)).total()
    return 2 * both / (len(found) + len(wanted)) if found or wanted else 1.0


@given(OBJECTS, OBJECTS, st.sampled_from(DESCRIPTION_KINDS))
def test_attributes_match_as_lists_do(first, second, style):
    scores = embedded.attribute_f1(described(first, style), described(second, style))
    for i, name in enumerate(embedded.ATTRIBUTES):
        assert scores[name] == pytest.approx(plain_f1([one[i] for one in first], [one[i] for one in second]))


@given(OBJECTS, st.randoms(use_true_random=False), st.sampled_from(DESCRIPTION_KINDS))
def test_order_and_style_do_not_matter(objects, random, style):
    first, second = described(random.sample(objects, len(objects)), style), described(objects, "describe")
    assert embedded.scene_attributes(first) == embedded.scene_attributes(second)
    assert embedded.attribute_f1(first, described(objects, style)) == dict.fromkeys(embedded.ATTRIBUTES, 1.0)


def test_only_descriptions_have_attributes():
    answer = "A1 red 3 B2 blue 4"
    figures = embedded.SceneScore.figures("A1 blue 3 B2 red 4", {"kind": "describe", "answer": answer})
    assert figures == {"score": 0, "place_f1": 1, "color_f1": 1, "digit_f1": 1}
    assert embedded.SceneScore.figures("red 3", {"kind": "read", "answer": "red 3"}) == {"score": 1}
    metric = embedded.SceneScore()
    metric.update([answer, "red"], [{"kind": "list", "answer": answer}, {"kind": "color", "answer": "blue"}])
    assert metric.compute() == {"score": 0.5, "place_f1": 1, "color_f1": 1, "digit_f1": 1}
