"""Bootstrap intervals: coverage, pairing, reproducibility."""

from __future__ import annotations

import numpy as np
import pytest

from subtoken_train.evaluation.intervals import bootstrap_interval


def test_matches_the_normal_approximation():
    scores = (np.random.default_rng(0).random(4000) < 0.3).astype(float)
    low, high = bootstrap_interval(scores)
    half = 1.96 * scores.std() / np.sqrt(len(scores))
    assert low == pytest.approx(scores.mean() - half, abs=0.15 * half)
    assert high == pytest.approx(scores.mean() + half, abs=0.15 * half)


def test_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(1)
    hits = 0
    for trial in range(100):
        low, high = bootstrap_interval(rng.normal(0.5, 0.2, 200), seed=trial)
        hits += low <= 0.5 <= high
    assert 87 <= hits <= 100


def test_pairing_narrows_the_interval():
    rng = np.random.default_rng(2)
    base = rng.random(500)
    better = base + 0.05 + rng.normal(0, 0.01, 500)
    low, high = bootstrap_interval(better - base)
    assert 0.04 < low < high < 0.06


def test_same_seed_same_interval_and_no_scores():
    assert bootstrap_interval([0.0, 1.0, 1.0]) == bootstrap_interval([0.0, 1.0, 1.0])
    assert bootstrap_interval([1.0]) == (1.0, 1.0)
    with pytest.raises(ValueError, match="no scores"):
        bootstrap_interval([])
