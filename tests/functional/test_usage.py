"""What routing does with its budget, against counting in plain python."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subtoken_train.functional.masks import fixed_mask
from subtoken_train.functional.usage import (
    best_of_each,
    by_relevance,
    choice_entropy,
    group_counts,
    group_usage,
    kept_histogram,
    mask_entropy,
    masked_moments,
    shared_pairs,
    usage_entropy,
)
from tests.support.helpers import random_mask, random_scores

SIZES = st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 9))
SEEDS = st.integers(0, 1000)


def kept_groups(mask_BNS, routed_BN):
    """(sample, token) -> the set of groups that it keeps, routed tokens only."""
    return {
        (b, n): {s for s in range(mask_BNS.shape[2]) if mask_BNS[b, n, s]}
        for b in range(mask_BNS.shape[0])
        for n in range(mask_BNS.shape[1])
        if routed_BN[b, n]
    }


@given(SIZES, SEEDS)
@settings(max_examples=60, deadline=None)
def test_counts_and_histogram(size, seed):
    mask, routed = random_mask(seed, *size), random_mask(seed + 1, *size[:2])
    kept = kept_groups(mask, routed).values()
    groups = range(size[2])
    assert group_counts(mask, routed).tolist() == [sum(s in groups_j for groups_j in kept) for s in groups]
    assert kept_histogram(mask, routed).tolist() == [sum(len(g) == k for g in kept) for k in range(size[2] + 1)]
    usage = group_usage(mask, routed)
    total = sum(map(len, kept))
    assert usage.sum() == pytest.approx(1 if total else 0)
    assert shared_pairs(mask, mask, routed) == total


@given(SIZES, SEEDS, st.sampled_from([None, 1, 3]))
@settings(max_examples=60, deadline=None)
def test_order_of_relevance(size, seed, levels):
    mask, routed = random_mask(seed, *size), random_mask(seed + 1, *size[:2])
    relevance = random_scores(seed, *size[:2], levels=levels)
    kept, ordered, valid = by_relevance(mask, relevance, routed)
    for b in range(size[0]):
        tokens = sorted((n for n in range(size[1]) if routed[b, n]), key=lambda n: (-relevance[b, n], n))
        assert valid[b].tolist() == [rank < len(tokens) for rank in range(size[1])]
        assert kept[b, : len(tokens)].tolist() == [int(mask[b, n].sum()) for n in tokens]
        assert ordered[b, : len(tokens)].tolist() == [float(relevance[b, n]) for n in tokens]


@given(SIZES, SEEDS, st.sampled_from([None, 1, 3]), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=60, deadline=None)
def test_best_of_each_token(size, seed, levels, dtype):
    """As many groups as the mask keeps, the best-scored ones; for a fixed budget that is the fixed mask."""
    mask, scores = random_mask(seed, *size), random_scores(seed, *size, levels=levels, dtype=dtype)
    best = best_of_each(scores, mask)
    for b in range(size[0]):
        for n in range(size[1]):
            order = sorted(range(size[2]), key=lambda s: (-float(scores[b, n, s]), s))
            wanted = set(order[: int(mask[b, n].sum())])
            assert {s for s in range(size[2]) if best[b, n, s]} == wanted
    fixed = fixed_mask(scores, min(2, size[2]))
    other = fixed_mask(-scores.float(), min(2, size[2]))
    assert torch.equal(best_of_each(scores, other), fixed)


def test_entropy_is_that_of_the_shares():
    assert usage_entropy(torch.full((8,), 1 / 8)) == pytest.approx(1)
    assert usage_entropy(torch.tensor([1.0, 0, 0, 0])) == pytest.approx(0, abs=1e-6)
    assert usage_entropy(torch.tensor([1.0])) == 1
    expected = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4)
    assert usage_entropy(torch.tensor([0.75, 0.25, 0, 0])) == pytest.approx(expected)


def entropy_of_yes(share):
    return -sum(p * math.log(p) for p in (share, 1 - share) if p)


@given(SIZES, SEEDS)
@settings(max_examples=60, deadline=None)
def test_mask_entropy(size, seed):
    mask, routed = random_mask(seed, *size), random_mask(seed + 1, *size[:2])
    kept = list(kept_groups(mask, routed).values())
    shares = [sum(s in groups for groups in kept) / max(len(kept), 1) for s in range(size[2])]
    largest = entropy_of_yes(sum(shares) / len(shares))
    expected = sum(map(entropy_of_yes, shares)) / len(shares) / largest if largest > 1e-9 else 0
    assert float(mask_entropy(mask, routed)) == pytest.approx(expected, abs=1e-5)


@given(SIZES, SEEDS, st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=60, deadline=None)
def test_choice_entropy_and_moments(size, seed, dtype):
    logits, routed = random_scores(seed, *size, dtype=dtype), random_mask(seed + 1, *size[:2])
    rows = [logits[b, n].tolist() for b in range(size[0]) for n in range(size[1]) if routed[b, n]]
    entropies = []
    for row in rows:
        total = sum(map(math.exp, row))
        entropies.append(-sum(math.exp(x) / total * math.log(math.exp(x) / total) for x in row))
    scale = math.log(size[2]) if size[2] > 1 else 1
    expected = sum(entropies) / len(rows) / scale if rows and size[2] > 1 else 0
    assert float(choice_entropy(logits, routed)) == pytest.approx(expected, abs=1e-5)
    values = [x for row in rows for x in row]
    mean, deviation = masked_moments(logits, routed)
    expected_mean = sum(values) / len(values) if values else 0
    variance = sum((x - expected_mean) ** 2 for x in values) / len(values) if values else 0
    assert float(mean) == pytest.approx(expected_mean, abs=1e-5)
    assert float(deviation) == pytest.approx(math.sqrt(variance), abs=1e-5)
