"""Scores, paired differences and means against figures worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subtoken_train.evaluation.intervals import bootstrap_interval, quantile_interval, resampled_means
from subtoken_train.evaluation.reporting.runs import ArmResults, read_results
from subtoken_train.evaluation.reporting.score_tables import (
    Estimate,
    difference_estimate,
    mean_difference,
    mean_estimate,
    score_estimate,
)
from tests.support.report_results import answers, facts, register, write_run


@pytest.fixture(autouse=True)
def tasks(monkeypatch):
    register(monkeypatch, "pope", "gqa", "mme")


def by_name(folder) -> dict[str, ArmResults]:
    return {arm.name: arm for arm in read_results([folder])}


def test_score_difference_and_intervals_of_one_task(tmp_path):
    write_run(tmp_path, facts("a"), "pope", answers(range(30)))
    write_run(tmp_path, facts("b"), "pope", answers(range(4, 28)))
    arms = by_name(tmp_path)
    score = score_estimate(arms["a"], "pope")
    assert (score.value, score.n, score.form, score.marks) == (pytest.approx(0.75), 40, "fraction", ())
    assert score.error == pytest.approx(np.sqrt(0.75 * 0.25 / 40), rel=0.05)  # of a mean of 40 draws
    difference = difference_estimate(arms["a"], arms["b"], "pope")
    assert difference.value == pytest.approx(6 / 40)
    # six samples are +1 and 34 are 0: nothing is lost, so the interval may not go below 0
    assert 0 <= difference.low < 6 / 40 < difference.high < 0.3
    assert difference.error == pytest.approx(np.sqrt(0.15 * 0.85 / 40), rel=0.05)


def test_pairing_is_by_id_and_over_shared_samples(tmp_path):
    write_run(tmp_path, facts("a"), "pope", answers(range(10))[:20], rows=40)
    write_run(tmp_path, facts("b"), "pope", answers(range(5)))
    arms = by_name(tmp_path)
    difference = difference_estimate(arms["a"], arms["b"], "pope")
    assert (difference.value, difference.n) == (5 / 20, 20)
    assert difference.marks == ("incomplete: 20 of 40",)
    assert score_estimate(arms["a"], "pope").value == pytest.approx(0.5)


def test_other_samples_are_not_paired(tmp_path):
    write_run(tmp_path, facts("a"), "pope", answers(range(10)))
    write_run(tmp_path, facts("b"), "pope", answers(range(5)), digest="others")
    arms = by_name(tmp_path)
    assert difference_estimate(arms["a"], arms["b"], "pope") == "other samples"
    assert mean_difference(arms["a"], arms["b"], ["pope"]) is None


def test_a_score_that_is_no_mean_over_samples_has_no_interval(tmp_path, monkeypatch):
    register(monkeypatch, "pope", primary="worst")
    write_run(tmp_path, facts("a"), "pope", answers(range(30)), primary="worst")
    write_run(tmp_path, facts("b"), "pope", answers(range(20)), primary="worst")
    arms = by_name(tmp_path)
    assert score_estimate(arms["a"], "pope") == Estimate(pytest.approx(0.5625), None, None, None, 40)
    assert difference_estimate(arms["a"], arms["b"], "pope").value == pytest.approx(0.5625 - 0.25)
    assert difference_estimate(arms["a"], arms["b"], "pope").low is None
    assert mean_estimate(arms["a"], ["pope"]).low is None


def test_a_mean_wants_all_of_its_tasks_and_resamples_within_them(tmp_path):
    for name, right in (("a", 30), ("b", 20)):
        write_run(tmp_path, facts(name), "pope", answers(range(right)))
        write_run(tmp_path, facts(name), "gqa", answers(range(10))[:10], rows=10, expected=10)
    arms = by_name(tmp_path)
    mean = mean_estimate(arms["a"], ["pope", "gqa"])
    assert (mean.value, mean.n) == (pytest.approx((0.75 + 1) / 2), 50)
    # gqa has no spread, so the error is half of pope's: a pooled resample would give another
    assert mean.error == pytest.approx(0.5 * np.sqrt(0.75 * 0.25 / 40), rel=0.05)
    assert mean_estimate(arms["a"], ["pope", "gqa", "mme"]) is None
    assert mean_difference(arms["a"], arms["b"], ["pope", "gqa"]).value == pytest.approx(10 / 40 / 2)
    assert mean_difference(arms["a"], arms["b"], ["pope", "mme"]) is None


def test_seeds_are_averaged_and_their_spread_is_in_the_interval(tmp_path):
    for seed, right in ((0, 40), (1, 20)):
        write_run(tmp_path, facts(f"a-seed{seed}", seed=seed), "pope", answers(range(right)))
        write_run(tmp_path, facts(f"b-seed{seed}", seed=seed), "pope", answers(range(right - 4)))
    write_run(tmp_path, facts("c"), "pope", answers(range(20)))
    arms = by_name(tmp_path)
    assert arms["a"].seeds == [0, 1]
    score = score_estimate(arms["a"], "pope")
    assert (score.value, score.n) == (0.75, 40)
    assert score.low < 0.45  # both draws may be the worse seed
    assert score.high == 1.0
    paired = difference_estimate(arms["a"], arms["b"], "pope")
    assert paired.value == pytest.approx(0.1)  # seed by seed: the seeds' own spread is gone
    assert paired.high < 0.25
    assert paired.marks == ()
    alone = difference_estimate(arms["a"], arms["c"], "pope")
    assert alone.value == pytest.approx(0.25)
    assert alone.marks == ("anchor of other seeds",)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=2, max_size=30), st.integers(1, 3))
def test_counts_of_equal_columns_have_the_distribution_of_single_draws(values, seeds):
    table = np.array([np.roll(values, shift) for shift in range(seeds)])
    draws = resampled_means([table])
    assert draws.mean() == pytest.approx(table.mean(), abs=4 * draws.std() / np.sqrt(len(draws)) + 1e-9)
    low, high = bootstrap_interval(table)
    step = 0.02 + 2 / table.shape[1]  # quantiles of a discrete mean move by whole steps
    assert quantile_interval(draws) == (pytest.approx(low, abs=step), pytest.approx(high, abs=step))


def test_the_mean_over_tasks_shares_the_seeds_draw():
    bad, good = np.zeros((2, 10)), np.zeros((2, 10))
    bad[0], good[1] = 1, 1
    assert resampled_means([bad, good]).std() == 0  # one seed's loss is its gain on the other task
    assert resampled_means([bad, bad]).std() == pytest.approx(np.sqrt(0.125), rel=0.05)
    with pytest.raises(ValueError, match="no scores"):
        resampled_means([[1.0], []])
