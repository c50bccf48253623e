"""Bootstrap intervals: coverage, pairing, seeds, reproducibility."""

from __future__ import annotations

import numpy as np
import pytest

from subtoken_train.evaluation import intervals
from subtoken_train.evaluation.intervals import bootstrap_interval


def test_matches_the_normal_approximation():
    scores = (np.random.default_rng(0).random(4000) < 0.3).astype(float)
    low, high = bootstrap_interval(scores)
    half = 1.96 * scores.std() / np.sqrt(len(scores))
    assert low == pytest.approx(scores.mean() - half, abs=0.15 * half)
    assert high == pytest.approx(scores.mean() + half, abs=0.15 * half)


@pytest.mark.slow
@pytest.mark.parametrize(("seeds", "least", "most"), [(1, 87, 100), (5, 75, 97)])
def test_covers_the_truth_about_as_often_as_it_says(seeds, least, most):
    """Resampling five seeds is known to be a little narrow; it must still be far better than ignoring them."""
    rng, hits = np.random.default_rng(seeds), 0
    for trial in range(100):
        scores = 0.5 + rng.normal(0, 0.1, (seeds, 1)) * (seeds > 1) + rng.normal(0, 0.2, 200)
        low, high = bootstrap_interval(scores, seed=trial)
        hits += low <= 0.5 <= high
    assert least <= hits <= most


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


def test_the_spread_between_seeds_widens_the_interval():
    rng = np.random.default_rng(3)
    questions = rng.normal(0, 0.3, 1000)
    alike = questions + rng.normal(0, 0.01, (5, 1))
    apart = questions + rng.normal(0, 0.2, (5, 1))
    widths = [high - low for low, high in map(bootstrap_interval, (questions, alike, apart))]
    assert widths[1] == pytest.approx(widths[0], rel=0.2)
    assert widths[2] > 3 * widths[0]


@pytest.mark.parametrize("shape", [(1, 7), (3, 40)])
def test_kept_draws_are_the_draws(shape, monkeypatch):
    scores = np.random.default_rng(5).random(shape)
    kept = bootstrap_interval(scores)
    monkeypatch.setattr(intervals, "KEPT_QUESTIONS", 0)
    assert bootstrap_interval(scores) == kept
