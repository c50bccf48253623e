"""Group masks against plain python: exact budgets and ties, the gradient that passes through them, their statistics."""

import math
from fractions import Fraction
from math import floor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.functional import masks
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
    for own, places, some in zip(ranked_counts(rank, routed, kept, num_groups), rank, routed, strict=True):
        expected = slow_ranked(int(some.sum()), kept, num_groups)
        assert own.tolist() == [expected[j] if is_routed else 0 for j, is_routed in zip(places, some, strict=True)]


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


SIZES = DRAWN["sizes"]
LEVELS, DTYPES = st.sampled_from([None, 1, 3]), st.sampled_from([torch.float32, torch.bfloat16])


def entropy_of_yes(share):
    return -sum(p * math.log(p) for p in (share, 1 - share) if p)


@given(SIZES, SEEDS)
def test_counts_histogram_and_entropy_of_masks(size, seed):
    mask, routed = random_mask(seed, *size), random_mask(seed + 1, *size[:2])
    rows = mask[routed].tolist()
    counts, total = [sum(row[s] for row in rows) for s in range(size[2])], sum(map(sum, rows))
    assert masks.group_counts(mask, routed).tolist() == counts
    assert masks.kept_histogram(mask, routed).tolist() == [sum(sum(r) == k for r in rows) for k in range(size[2] + 1)]
    assert masks.group_usage(mask, routed).sum() == pytest.approx(1 if total else 0)
    shares = [count / max(len(rows), 1) for count in counts]
    largest = entropy_of_yes(sum(shares) / len(shares))
    expected = sum(map(entropy_of_yes, shares)) / len(shares) / largest if largest > 1e-9 else 0
    assert float(masks.mask_entropy(mask, routed)) == pytest.approx(expected, abs=1e-5)


@given(SIZES, SEEDS, LEVELS)
def test_order_of_relevance(size, seed, levels):
    mask, routed = random_mask(seed, *size), random_mask(seed + 1, *size[:2])
    relevance = random_scores(seed, *size[:2], levels=levels)
    kept, ordered, valid = masks.by_relevance(mask, relevance, routed)
    for b in range(size[0]):
        tokens = sorted((n for n in range(size[1]) if routed[b, n]), key=lambda n, b=b: (-relevance[b, n], n))
        assert valid[b].tolist() == [rank < len(tokens) for rank in range(size[1])]
        assert kept[b, : len(tokens)].tolist() == [int(mask[b, n].sum()) for n in tokens]
        assert ordered[b, : len(tokens)].tolist() == [float(relevance[b, n]) for n in tokens]


def test_entropy_is_that_of_the_shares():
    expected = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4)
    for shares, entropy in (([1 / 8] * 8, 1), ([1.0, 0, 0, 0], 0), ([1.0], 1), ([0.75, 0.25, 0, 0], expected)):
        assert masks.usage_entropy(torch.tensor(shares)) == pytest.approx(entropy, abs=1e-6)


@given(SIZES, SEEDS, DTYPES)
def test_choice_entropy(size, seed, dtype):
    logits, routed = random_scores(seed, *size, dtype=dtype), random_mask(seed + 1, *size[:2])
    rows = logits[routed].tolist()
    chances = [[math.exp(x) / sum(map(math.exp, row)) for x in row] for row in rows]
    entropies = [-sum(p * math.log(p) for p in row) for row in chances]
    expected = sum(entropies) / len(rows) / math.log(size[2]) if rows and size[2] > 1 else 0
    assert float(masks.choice_entropy(logits, routed)) == pytest.approx(expected, abs=1e-5)
