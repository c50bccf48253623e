"""Perplexity, and choices by log-likelihood."""

import math

import pytest

from subtoken_train.evaluation.metrics.likelihoods import MultipleChoice, Perplexity
from tests.support.vqa_cases import reference_cases

TEXTS = [
    ([-12.5], {"words": 5, "bytes": 31}),
    ([-3.25], {"words": 2, "bytes": 9}),
    ([-40.0], {"words": 11, "bytes": 60}),
]


def scores(metric):
    return metric.compute()


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
    assert scores(metric) == pytest.approx(expected, abs=1e-9)


def test_a_fair_coin_per_byte_is_one_bit():
    metric = Perplexity()
    metric.update([[-8 * math.log(2)]], [{"words": 2, "bytes": 8}])
    assert scores(metric) == pytest.approx({"word_perplexity": 16, "byte_perplexity": 2, "bits_per_byte": 1})
    assert Perplexity.score([-8 * math.log(2)], {"words": 2, "bytes": 8}) == pytest.approx(0.5)
    assert not Perplexity.higher_is_better
    assert Perplexity.points == set(scores(metric))


def test_the_first_of_the_likeliest_is_chosen():
    assert MultipleChoice.score([-2.0, -1.0, -1.0, -3.0], {"answer": 1}) == 1
    assert MultipleChoice.score([-2.0, -1.0, -1.0, -3.0], {"answer": 2}) == 0
    metric = MultipleChoice()
    metric.update([[-1.0, -2.0], [-1.0, -2.0], [-3.0, -2.0]], [{"answer": 0}, {"answer": 1}, {"answer": 1}])
    assert metric.compute()["accuracy"] == 2 / 3


def test_reference_items(shared):
    cases = reference_cases(shared, "mmlu")
    for case in cases:
        score = MultipleChoice.score(case["loglikelihoods"], {"answer": case["doc"]["answer"]})
        assert score == case["lm_eval_result"]["acc"]
