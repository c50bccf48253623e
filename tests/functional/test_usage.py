"""What routing does with its budget, against counting in plain python."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.functional import usage
from subtoken_train.functional.masks import fixed_mask
from tests.support.helpers import random_mask, random_scores

SIZES, SEEDS = st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 9)), st.integers(0, 1000)
LEVELS, DTYPES = st.sampled_from([None, 1, 3]), st.sampled_from([torch.float32, torch.bfloat16])


def routed_rows(tensor_BNS, routed_BN):
    """The rows of routed tokens, as lists."""
    return tensor_BNS[routed_BN].tolist()


def entropy_of_yes(share):
    return -sum(p * math.log(p) for p in (share, 1 - share) if p)


@given(SIZES, SEEDS)
def test_counts_histogram_and_entropy_of_masks(size, seed):
    mask, routed = random_mask(seed, *size), random_mask(seed + 1, *size[:2])
    rows = routed_rows(mask, routed)
    counts, total = [sum(row[s] for row in rows) for s in range(size[2])], sum(map(sum, rows))
    assert usage.group_counts(mask, routed).tolist() == counts
    assert usage.kept_histogram(mask, routed).tolist() == [
        sum(sum(row) == k for row in rows) for k in range(size[2] + 1)
    ]
    assert usage.group_usage(mask, routed).sum() == pytest.approx(1 if total else 0)
    assert usage.shared_pairs(mask, mask, routed) == total
    shares = [count / max(len(rows), 1) for count in counts]
    largest = entropy_of_yes(sum(shares) / len(shares))
    expected = sum(map(entropy_of_yes, shares)) / len(shares) / largest if largest > 1e-9 else 0
    assert float(usage.mask_entropy(mask, routed)) == pytest.approx(expected, abs=1e-5)


@given(SIZES, SEEDS, LEVELS)
def test_order_of_relevance(size, seed, levels):
    mask, routed = random_mask(seed, *size), random_mask(seed + 1, *size[:2])
    relevance = random_scores(seed, *size[:2], levels=levels)
    kept, ordered, valid = usage.by_relevance(mask, relevance, routed)
    for b in range(size[0]):
        tokens = sorted((n for n in range(size[1]) if routed[b, n]), key=lambda n, b=b: (-relevance[b, n], n))
        assert valid[b].tolist() == [rank < len(tokens) for rank in range(size[1])]
        assert kept[b, : len(tokens)].tolist() == [int(mask[b, n].sum()) for n in tokens]
        assert ordered[b, : len(tokens)].tolist() == [float(relevance[b, n]) for n in tokens]


@given(SIZES, SEEDS, LEVELS, DTYPES)
def test_best_of_each_token(size, seed, levels, dtype):
    """As many groups as the mask keeps, the best-scored ones; for a fixed budget that is the fixed mask."""
    mask, scores = random_mask(seed, *size), random_scores(seed, *size, levels=levels, dtype=dtype)
    best = usage.best_of_each(scores, mask)
    for marks, own, chosen in zip(mask.flatten(0, 1), scores.flatten(0, 1), best.flatten(0, 1), strict=True):
        order = sorted(range(size[2]), key=lambda s, own=own: (-float(own[s]), s))
        assert chosen.nonzero()[:, 0].tolist() == sorted(order[: int(marks.sum())])
    fixed, other = (fixed_mask(sign * scores.float(), min(2, size[2])) for sign in (1, -1))
    assert torch.equal(usage.best_of_each(scores, other), fixed)


def test_entropy_is_that_of_the_shares():
    expected = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4)
    for shares, entropy in (([1 / 8] * 8, 1), ([1.0, 0, 0, 0], 0), ([1.0], 1), ([0.75, 0.25, 0, 0], expected)):
        assert usage.usage_entropy(torch.tensor(shares)) == pytest.approx(entropy, abs=1e-6)


@given(SIZES, SEEDS, DTYPES)
def test_choice_entropy_and_moments(size, seed, dtype):
    logits, routed = random_scores(seed, *size, dtype=dtype), random_mask(seed + 1, *size[:2])
    rows = routed_rows(logits, routed)
    chances = [[math.exp(x) / sum(map(math.exp, row)) for x in row] for row in rows]
    entropies = [-sum(p * math.log(p) for p in row) for row in chances]
    expected = sum(entropies) / len(rows) / math.log(size[2]) if rows and size[2] > 1 else 0
    assert float(usage.choice_entropy(logits, routed)) == pytest.approx(expected, abs=1e-5)
    values = [x for row in rows for x in row] or [0.0]
    mean = sum(values) / len(values)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in values) / len(values))
    found = [float(each) for each in usage.masked_moments(logits, routed)]
    assert found == pytest.approx([mean, deviation], abs=1e-5)
