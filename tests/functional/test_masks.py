"""Group masks: exact budgets and ties against a sort in plain python, and the gradient that passes through them."""

from fractions import Fraction
from math import floor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subtoken_train.functional.gather import rank_candidates
from subtoken_train.functional.masks import counted_mask, fixed_mask, global_mask, ranked_counts, straight_through
from tests.support.helpers import random_mask, random_scores

SIZES = st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 9))
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
LEVELS = st.sampled_from([None, 1, 2, 4])  # 1: everything ties


def best_first(scores):
    """Indices of a list of scores, best first; equal scores in their order."""
    return sorted(range(len(scores)), key=lambda index: (-scores[index], index))


def slow_fixed(scores_BNS, kept_groups):
    mask = torch.zeros(scores_BNS.shape, dtype=torch.bool)
    for sample, tokens in enumerate(scores_BNS.tolist()):
        for token, scores in enumerate(tokens):
            for group in best_first(scores)[:kept_groups]:
                mask[sample, token, group] = True
    return mask


def slow_global(scores_BNS, kept_groups, routed_BN):
    mask = torch.zeros(scores_BNS.shape, dtype=torch.bool)
    for sample, tokens in enumerate(scores_BNS.tolist()):
        pairs = [(n, s) for n in range(len(tokens)) if routed_BN[sample, n] for s in range(len(tokens[n]))]
        order = best_first([tokens[n][s] for n, s in pairs])
        for chosen in order[: int(routed_BN[sample].sum()) * kept_groups]:
            mask[(sample, *pairs[chosen])] = True
    return mask


@settings(max_examples=50, deadline=None)
@given(sizes=SIZES, seed=st.integers(0, 10_000), levels=LEVELS, dtype=DTYPES, data=st.data())
def test_fixed_budget(sizes, seed, levels, dtype, data):
    kept_groups = data.draw(st.integers(1, sizes[2]))
    scores = random_scores(seed, *sizes, levels=levels, dtype=dtype)
    mask = fixed_mask(scores, kept_groups)
    assert torch.equal(mask, slow_fixed(scores, kept_groups))


@settings(max_examples=50, deadline=None)
@given(
    sizes=SIZES,
    seed=st.integers(0, 10_000),
    levels=LEVELS,
    dtype=DTYPES,
    routed_share=st.sampled_from([0.0, 0.5, 1.0]),
    data=st.data(),
)
def test_global_budget(sizes, seed, levels, dtype, routed_share, data):
    kept_groups = data.draw(st.integers(1, sizes[2]))
    scores = random_scores(seed, *sizes, levels=levels, dtype=dtype)
    routed = random_mask(seed, *sizes[:2], share=routed_share)
    mask = global_mask(scores, kept_groups, routed)
    assert torch.equal(mask, slow_global(scores, kept_groups, routed))


@settings(max_examples=50, deadline=None)
@given(sizes=SIZES, seed=st.integers(0, 10_000), levels=LEVELS, dtype=DTYPES)
def test_a_budget_per_token(sizes, seed, levels, dtype):
    scores = random_scores(seed, *sizes, levels=levels, dtype=dtype)
    counts = random_scores(seed + 1, *sizes[:2], levels=sizes[2] + 1, dtype=torch.int64)
    mask = counted_mask(scores, counts)
    assert torch.equal(mask.sum(-1), counts)
    for sample, token in counts.nonzero().tolist():
        expected = slow_fixed(scores[sample : sample + 1], int(counts[sample, token]))[0, token]
        assert torch.equal(mask[sample, token], expected)


def slow_ranked(tokens, kept_groups, num_groups):
    """Counts by rank, as the docstring says it, in fractions."""
    high = min(num_groups, 2 * kept_groups)
    low = 2 * kept_groups - high
    counts = [floor(high + (low - high) * (j + Fraction(1, 2)) / tokens) for j in range(tokens)]
    best = 0
    while sum(counts) < tokens * kept_groups:
        counts[best] += 1
        best += 1
    return counts


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 60)),
    seed=st.integers(0, 10_000),
    routed_share=st.sampled_from([0.0, 0.5, 1.0]),
    num_groups=st.sampled_from([1, 4, 9, 64]),
    data=st.data(),
)
def test_ranked_counts_of_a_batch(sizes, seed, routed_share, num_groups, data):
    """Every sample spends its own n * K, whatever stands in unrouted places; a sample may route nothing."""
    kept_groups = data.draw(st.integers(1, num_groups))
    routed = random_mask(seed, *sizes, share=routed_share)
    rank = rank_candidates(random_scores(seed, *sizes), routed)
    rank = torch.where(routed, rank, data.draw(st.sampled_from([-7, 0, 99])))
    counts = ranked_counts(rank, routed, kept_groups, num_groups)
    for sample in range(sizes[0]):
        expected = slow_ranked(int(routed[sample].sum()), kept_groups, num_groups)
        for token in range(sizes[1]):
            assert counts[sample, token] == (expected[rank[sample, token]] if routed[sample, token] else 0)


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


def test_minus_infinity_is_a_score_like_any_other():
    """A group that scores -inf is chosen last, but before any group of an unrouted token."""
    scores = torch.full((1, 3, 2), -torch.inf)
    scores[0, 2, 1] = 0.0
    routed = torch.tensor([[False, True, True]])
    assert global_mask(scores, 1, routed)[0].tolist() == [[False, False], [True, False], [False, True]]


LOGITS = st.lists(st.floats(allow_nan=False, width=32), min_size=1, max_size=20)


@settings(max_examples=100, deadline=None)
@given(numbers=LOGITS, dtype=st.sampled_from([torch.float32, torch.bfloat16]), seed=st.integers(0, 1000))
def test_value_is_the_hard_mask_and_gradient_the_sigmoids(numbers, dtype, seed):
    logits = torch.tensor(numbers).to(dtype).requires_grad_()
    hard = random_mask(seed, len(numbers), share=0.5)
    gate = straight_through(hard, logits)
    assert gate.dtype == dtype
    assert torch.equal(gate, hard.to(dtype))

    upstream = torch.arange(1, len(numbers) + 1, dtype=dtype)
    gate.backward(upstream)
    soft = torch.tensor(numbers).to(dtype).double().sigmoid()
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    expected = (soft * (1 - soft) * upstream.double()).to(dtype)
    assert torch.allclose(logits.grad, expected, rtol=tolerance, atol=tolerance)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1000), learns=st.booleans())
def test_equals_the_formula_of_the_method(seed, learns):
    """``hard + (soft - soft.detach())``, where it learns; bit for bit."""
    hard, learned = random_mask(seed, 2, 5, 4), random_mask(seed + 1, 2, 5, 1) if learns else None
    ours, theirs = (random_scores(seed, 2, 5, 4).requires_grad_() for _ in range(2))
    soft = theirs.sigmoid()
    expected = hard.float() + (soft - soft.detach())
    expected = expected if learned is None else torch.where(learned, expected, hard.float())
    found = straight_through(hard, ours, learned)
    assert torch.equal(found, expected)
    upstream = random_scores(seed + 2, 2, 5, 4)
    found.backward(upstream)
    expected.backward(upstream)
    assert torch.equal(ours.grad, theirs.grad)
