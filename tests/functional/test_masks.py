"""Group masks: exact budgets and ties against a sort in plain python, and the gradient that passes through them."""

from fractions import Fraction
from math import floor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.functional.gather import rank_candidates
from subtoken_train.functional.masks import counted_mask, fixed_mask, global_mask, ranked_counts, straight_through
from tests.support.helpers import random_mask, random_scores

SEEDS, SHARES = st.integers(0, 10_000), st.sampled_from([0.0, 0.5, 1.0])
DRAWN = {
    "sizes": st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 9)),
    "seed": SEEDS,
    "levels": st.sampled_from([None, 1, 2, 4]),  # 1: everything ties
    "dtype": st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
}


def marked(scores, count, routed=None):
    """Marks of the ``count`` best of all routed (token, group) pairs; equal scores in their order."""
    pairs = [(n, s) for n, row in enumerate(scores) for s in range(len(row)) if routed is None or routed[n]]
    mask = torch.zeros(scores.shape, dtype=torch.bool)
    for pair in sorted(pairs, key=lambda pair: -float(scores[pair]))[:count]:
        mask[pair] = True
    return mask


@given(data=st.data(), **DRAWN)
def test_budgets_of_tokens(sizes, seed, levels, dtype, data):
    scores, kept = random_scores(seed, *sizes, levels=levels, dtype=dtype), data.draw(st.integers(1, sizes[2]))
    counts = random_scores(seed + 1, *sizes[:2], levels=sizes[2] + 1, dtype=torch.int64)
    for mask, wanted in ((fixed_mask(scores, kept), counts * 0 + kept), (counted_mask(scores, counts), counts)):
        for b in range(sizes[0]):
            for n in range(sizes[1]):
                assert torch.equal(mask[b, n], marked(scores[b, n][None], int(wanted[b, n]))[0])


@given(share=SHARES, data=st.data(), **DRAWN)
def test_global_budget(sizes, seed, levels, dtype, share, data):
    kept, routed = data.draw(st.integers(1, sizes[2])), random_mask(seed, *sizes[:2], share=share)
    scores = random_scores(seed, *sizes, levels=levels, dtype=dtype)
    own = zip(scores, routed, strict=True)
    expected = torch.stack([marked(sample, int(some.sum()) * kept, some) for sample, some in own])
    assert torch.equal(global_mask(scores, kept, routed), expected)


def test_minus_infinity_is_a_score_like_any_other():
    """A group that scores -inf is chosen last, but before any group of an unrouted token."""
    scores = torch.full((1, 3, 2), -torch.inf)
    scores[0, 2, 1] = 0.0
    chosen = global_mask(scores, 1, torch.tensor([[False, True, True]]))
    assert chosen[0].tolist() == [[False, False], [True, False], [False, True]]


def slow_ranked(tokens, kept_groups, num_groups):
    """Counts by rank, as the docstring says it, in fractions."""
    high = min(num_groups, 2 * kept_groups)
    low = 2 * kept_groups - high
    counts = [floor(high + (low - high) * (j + Fraction(1, 2)) / tokens) for j in range(tokens)]
    for best in range(tokens * kept_groups - sum(counts)):
        counts[best] += 1
    return counts


@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 60)),
    seed=SEEDS,
    share=SHARES,
    num_groups=st.sampled_from([1, 4, 9, 64]),
    data=st.data(),
)
def test_ranked_counts(sizes, seed, share, num_groups, data):
    """Every sample spends its own n * K, whatever stands in unrouted places; a sample may route nothing."""
    kept, routed = data.draw(st.integers(1, num_groups)), random_mask(seed, *sizes, share=share)
    rank = torch.where(
        routed, rank_candidates(random_scores(seed, *sizes), routed), data.draw(st.sampled_from([-7, 99]))
    )
    counts = ranked_counts(rank, routed, kept, num_groups)
    for own, places, some in zip(counts, rank, routed, strict=True):
        expected = slow_ranked(int(some.sum()), kept, num_groups)
        assert own.tolist() == [expected[j] if is_routed else 0 for j, is_routed in zip(places, some, strict=True)]


@pytest.mark.parametrize(
    ("kept_groups", "num_groups", "expected"),
    [
        (4, 16, [8, 7, 6, 5, 3, 2, 1, 0]),  # the worst token keeps its key alone
        (12, 16, [16, 15, 14, 13, 11, 10, 9, 8]),  # no token above S
        (1, 4, [2, 2, 2, 2, 0, 0, 0, 0]),
        (16, 16, [16] * 8),
    ],
)
def test_ranked_schedules(kept_groups, num_groups, expected):
    rank = torch.arange(8)[None]
    assert ranked_counts(rank, rank >= 0, kept_groups, num_groups)[0].tolist() == expected


@given(
    numbers=st.lists(st.floats(allow_nan=False, width=32), min_size=1, max_size=20),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=SEEDS,
)
def test_a_gate_is_the_hard_mask_and_its_gradient_the_sigmoids(numbers, dtype, seed):
    logits, hard = torch.tensor(numbers).to(dtype).requires_grad_(), random_mask(seed, len(numbers), share=0.5)
    gate, upstream = straight_through(hard, logits), torch.arange(1, len(numbers) + 1, dtype=dtype)
    assert gate.dtype == dtype
    assert torch.equal(gate, hard.to(dtype))
    gate.backward(upstream)
    soft = torch.tensor(numbers).to(dtype).double().sigmoid()
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    expected = (soft * (1 - soft) * upstream.double()).to(dtype)
    assert torch.allclose(logits.grad, expected, rtol=tolerance, atol=tolerance)


@given(seed=SEEDS, learns=st.booleans())
def test_a_gate_equals_the_formula_of_the_method(seed, learns):
    """``hard + (soft - soft.detach())``, where it learns; bit for bit."""
    hard, learned = random_mask(seed, 2, 5, 4), random_mask(seed + 1, 2, 5, 1) if learns else None
    ours, theirs = (random_scores(seed, 2, 5, 4).requires_grad_() for _ in range(2))
    soft = theirs.sigmoid()
    expected = hard.float() + (soft - soft.detach())
    expected = expected if learned is None else torch.where(learned, expected, hard.float())
    found, upstream = straight_through(hard, ours, learned), random_scores(seed + 2, 2, 5, 4)
    assert torch.equal(found, expected)
    found.backward(upstream)
    expected.backward(upstream)
    assert torch.equal(ours.grad, theirs.grad)
