"""Dividing a budget between layers, by claims and from one pool: against whole-number arithmetic and plain loops."""

import itertools
from fractions import Fraction

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from subtoken_train.evictions.budgets import divide_budget, pooled_counts

LAYER = st.tuples(st.integers(0, 9), st.integers(0, 6), st.integers(0, 30))


def divide_plainly(layers, total):
    """One sample, in fractions: layers are (weight, least, most); those at a bound leave one after the other."""
    least = [min(low, most) for _, low, most in layers]
    most = [high for _, _, high in layers]
    total = min(max(total, sum(least)), sum(most))
    peak = max(weight for weight, _, _ in layers)
    faint = Fraction(peak, 10**9) if peak else Fraction(1)
    weights = [max(Fraction(weight), faint) for weight, _, _ in layers]

    def shares(factor):
        return [min(max(factor * w, low), high) for w, low, high in zip(weights, least, most, strict=True)]

    bends = sorted(
        {Fraction(bound) / w for w, low, high in zip(weights, least, most, strict=True) for bound in (low, high)}
    )
    factor = bends[0]
    for low, high in itertools.pairwise(bends):
        if sum(shares(low)) <= total <= sum(shares(high)):
            slope = (sum(shares(high)) - sum(shares(low))) / (high - low)
            factor = low + (total - sum(shares(low))) / slope if slope else low
            break
    real = shares(factor)
    counts = [int(share) for share in real]
    by_remainder = sorted(range(len(real)), key=lambda i: (-round((real[i] - counts[i]) * 10**6), i))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


def divide(layers, total):
    weight, least, most = (torch.tensor(column)[:, None] for column in zip(*layers, strict=True))
    return divide_budget(weight.float(), torch.tensor([total]), least, most)[:, 0].tolist()


@given(st.lists(LAYER, min_size=1, max_size=7), st.integers(0, 120))
def test_equals_fractions(layers, total):
    assert divide(layers, total) == divide_plainly(layers, total)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 6), st.integers(0, 30)), min_size=1), st.integers(0, 400))
def test_bounds_and_sum(layers, total):
    counts = divide(layers, total)
    least = [min(low, most) for _, low, most in layers]
    assert all(low <= count <= most for low, count, (_, _, most) in zip(least, counts, layers, strict=True))
    assert sum(counts) == min(max(total, sum(least)), sum(most for _, _, most in layers))


def test_samples_are_divided_apart():
    weight = torch.tensor([[1.0, 5.0], [3.0, 5.0]])
    least, most = torch.ones(2, 2, dtype=torch.long), torch.full((2, 2), 9)
    assert divide_budget(weight, torch.tensor([8, 4]), least, most).T.tolist() == [[2, 6], [2, 2]]


def plain_pool(curves, total, lower_bound):
    """Counts of one sample's runs: one entry after the other joins."""
    entries = [
        (rank > 0 or not lower_bound, rank >= lower_bound, -value, run, rank)
        for run, values in enumerate(curves)
        for rank, value in enumerate(values)
    ]
    chosen = [run for *_, run, _ in sorted(entries)[:total]]
    return [chosen.count(run) for run in range(len(curves))]


@given(st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=1, max_size=5), st.integers(0, 24), st.integers(0, 3))
@example([[5, 5], [1]], 2, 2)  # every run first
def test_pooled_counts(curves, total, lower_bound):
    curves = [sorted(values, reverse=True) for values in curves]
    padded = torch.full((1, len(curves), 6), -torch.inf)
    for run, values in enumerate(curves):
        padded[0, run, : len(values)] = torch.tensor(values, dtype=torch.float32)
    counts = pooled_counts(padded, torch.tensor([total]), lower_bound)[0].tolist()
    assert counts == plain_pool(curves, total, lower_bound)
    assert sum(counts) == min(total, sum(map(len, curves)))
