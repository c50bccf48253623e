"""Group masks: exact budgets, and ties that go to the lower index, against a sort in plain python."""

from fractions import Fraction
from math import floor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subtoken_train.functional.gather import rank_candidates
from subtoken_train.functional.masks import counted_mask, fixed_mask, global_mask, ranked_counts
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
    assert mask.dtype == torch.bool
    assert (mask.sum(-1) == kept_groups).all()
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
    assert torch.equal(mask.sum((1, 2)), routed.sum(-1) * kept_groups)
    assert not mask[~routed].any()
    assert torch.equal(mask, slow_global(scores, kept_groups, routed))


@settings(max_examples=50, deadline=None)
@given(sizes=SIZES, seed=st.integers(0, 10_000), levels=LEVELS, dtype=DTYPES)
def test_a_budget_per_token(sizes, seed, levels, dtype):
    scores = random_scores(seed, *sizes, levels=levels, dtype=dtype)
    counts = random_scores(seed + 1, *sizes[:2], levels=sizes[2] + 1, dtype=torch.int64)
    mask = counted_mask(scores, counts)
    assert torch.equal(mask.sum(-1), counts)
    for index in counts.nonzero().tolist():
        sample, token = index
        assert torch.equal(
            mask[sample, token], slow_fixed(scores[sample : sample + 1], int(counts[sample, token]))[0, token]
        )


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


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(tokens=st.integers(1, 80), num_groups=st.integers(1, 64), data=st.data())
def test_ranked_counts_spend_the_budget_and_never_rise(tokens, num_groups, data):
    kept_groups = data.draw(st.integers(1, num_groups))
    rank = torch.arange(tokens)[None]
    counts = ranked_counts(rank, rank >= 0, kept_groups, num_groups)[0].tolist()
    assert counts == slow_ranked(tokens, kept_groups, num_groups)
    assert sum(counts) == tokens * kept_groups
    assert counts == sorted(counts, reverse=True)
    assert 0 <= counts[-1] <= counts[0] <= num_groups


@settings(max_examples=50, deadline=None)
@given(
    sizes=SIZES,
    seed=st.integers(0, 10_000),
    routed_share=st.sampled_from([0.0, 0.5, 1.0]),
    num_groups=st.sampled_from([1, 4, 9]),
    data=st.data(),
)
def test_ranked_counts_of_a_batch(sizes, seed, routed_share, num_groups, data):
    """Every sample spends its own n * K, whatever stands in unrouted places; a sample may route nothing."""
    kept_groups = data.draw(st.integers(1, num_groups))
    routed = random_mask(seed, *sizes[:2], share=routed_share)
    rank = rank_candidates(random_scores(seed, *sizes[:2]), routed)
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
