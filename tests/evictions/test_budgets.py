"""Dividing a budget between layers: against whole-number arithmetic, bounds, sums and ties."""

import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.evictions.budgets import competing_counts, divide_budget
from subtoken_train.view.scores import Candidates

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


@pytest.mark.parametrize(
    ("layers", "total", "expected"),
    [
        ([(1, 1, 10), (1, 1, 10), (1, 1, 10)], 8, [3, 3, 2]),  # ties to the lower layer
        ([(8, 1, 10), (1, 1, 10), (1, 1, 10)], 20, [10, 5, 5]),  # what the first cannot take goes to the others
        ([(1, 1, 10), (0, 1, 10), (0, 1, 10)], 6, [4, 1, 1]),
        ([(1, 1, 4), (0, 1, 10), (0, 1, 10)], 10, [4, 3, 3]),  # layers of weight 0 share the rest
        ([(0, 1, 10), (0, 1, 10)], 5, [3, 2]),
        ([(5, 1, 0), (1, 1, 10)], 4, [0, 4]),  # a layer without entries
    ],
)
def test_examples(layers, total, expected):
    assert divide(layers, total) == expected


def test_samples_are_divided_apart():
    weight = torch.tensor([[1.0, 5.0], [3.0, 5.0]])
    least, most = torch.ones(2, 2, dtype=torch.long), torch.full((2, 2), 9)
    assert divide_budget(weight, torch.tensor([8, 4]), least, most).T.tolist() == [[2, 6], [2, 2]]


def test_competing_counts():
    competes = [torch.tensor([[True, False], [True, True]]), torch.tensor([[False], [True]])]
    candidates = Candidates([], competes, torch.zeros(2, 2, dtype=torch.long))
    assert competing_counts(candidates).tolist() == [[1, 2], [0, 1]]
