"""One byte budget for keys and groups: against a plain greedy, against every set there is, and at its edges."""

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subtoken_train.functional.one_budget import best_in_bytes, budget_bytes, cut_logit
from subtoken_train.types import EntryCosts
from tests.support.helpers import random_mask, random_scores

SIZES = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 7), st.integers(1, 4))
COSTS = st.builds(EntryCosts, st.integers(1, 20), st.integers(1, 9), st.just(0))
LEVELS = st.sampled_from([None, 1, 2, 4])  # 1: everything ties
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


def drawn(seed, sizes, levels=None, dtype=torch.float32):
    batch, heads, length, groups = sizes
    key = random_scores(seed, batch, heads, length, levels=levels, dtype=dtype)
    logits = random_scores(seed + 1, batch, heads, length, groups, levels=levels, dtype=dtype)
    return key, logits, random_mask(seed + 2, batch, length), random_mask(seed + 3, batch, length, share=0.2)


def slow_pool(entries, costs, budget):
    """The greedy in plain python: {entry: its kept groups}, of (key worth, group worths, always) in their order."""
    offers = []
    for place, (key, groups, always) in enumerate(entries):
        order = sorted(range(len(groups)), key=lambda g: (-groups[g], g))
        prefix = [np.float32(sum([key, *(groups[g] for g in order[:k])])) for k in range(len(groups) + 1)]
        densities = [worth / np.float32(costs.key + k * costs.group) for k, worth in enumerate(prefix)]
        first = len(groups) if always else densities.index(max(densities))
        density = np.inf if always else densities[first]
        offers.append((-density, place, 0, costs.key + first * costs.group, order[:first]))
        for k in range(first, len(groups)):
            worth = min(np.float32(groups[order[k]]) / np.float32(costs.group), density)
            offers.append((-worth, place, k + 1, costs.group, [order[k]]))
    offers.sort(key=lambda offer: offer[:3])
    kept, left, fits = {}, budget, True
    for _, place, number, cost, groups in offers:
        fits = fits and cost <= left
        if fits or (number and place in kept and cost <= left):
            kept.setdefault(place, []).extend(groups)
            left -= cost
    return kept


def slow_best(key, logits, competes, always, costs, budget_B, pooled):
    keys, groups = torch.zeros_like(key, dtype=torch.bool), torch.zeros_like(logits, dtype=torch.bool)
    batch, heads, _ = key.shape
    for sample in range(batch):
        for own in [range(heads)] if pooled else [[head] for head in range(heads)]:
            places = [(head, n) for n in competes[sample].nonzero()[:, 0].tolist() for head in own]
            if not places:
                continue
            all_logits = torch.cat([key[sample][..., None], logits[sample]], -1).float()
            top = max(all_logits[head, n].max() for head, n in places)
            worth = (all_logits - top).clamp(max=0).exp().tolist()
            entries = [(worth[h][n][0], worth[h][n][1:], bool(always[sample, n])) for h, n in places]
            for place, kept in slow_pool(entries, costs, int(budget_B[sample])).items():
                keys[(sample, *places[place])] = True
                for group in kept:
                    groups[(sample, *places[place], group)] = True
    return keys, groups


@settings(max_examples=80, deadline=None)
@given(
    sizes=SIZES,
    costs=COSTS,
    seed=st.integers(0, 10_000),
    levels=LEVELS,
    dtype=DTYPES,
    pooled=st.booleans(),
    share=st.fractions(0, 1),
)
def test_equals_the_plain_greedy(sizes, costs, seed, levels, dtype, pooled, share):
    key, logits, competes, always = drawn(seed, sizes, levels, dtype)
    entry = (costs.key + sizes[3] * costs.group) * (sizes[1] if pooled else 1)
    budget_B = budget_bytes(competes.sum(-1), entry, share)
    found = best_in_bytes(key, logits, competes[:, None], (always & competes)[:, None], costs, budget_B, pooled)
    for own, expected in zip(found, slow_best(key, logits, competes, always, costs, budget_B, pooled), strict=True):
        assert torch.equal(own, expected)


@pytest.mark.parametrize("share", [Fraction(1, 3), Fraction("0.21875"), Fraction(1)])
def test_bytes_are_a_share_rounded_down(share):
    count_B = torch.tensor([0, 1, 7, 131_072])
    found = budget_bytes(count_B, 2 * 128 * 2, share)
    exact = [int(count * 512 * share) for count in count_B.tolist()]
    assert all(0 <= own - given <= 1 for own, given in zip(exact, found.tolist(), strict=True))


def test_infinite_and_far_logits_are_ranked():
    key = torch.tensor([[[-torch.inf, 1e4, torch.inf]]])
    logits = torch.full((1, 1, 3, 2), -torch.inf)
    competes = torch.ones(1, 3, dtype=torch.bool)
    keys, _ = best_in_bytes(
        key, logits, competes[:, None], ~competes[:, None], EntryCosts(1, 1, 0), torch.tensor([1]), True
    )
    assert keys[0, 0].tolist() == [False, False, True]


def test_no_entries():
    empty = torch.zeros(1, 2, 0), torch.zeros(1, 2, 0, 4), torch.zeros(1, 1, 0, dtype=torch.bool)
    keys, groups = best_in_bytes(*empty, empty[2], EntryCosts(1, 1, 0), torch.tensor([0]), True)
    assert keys.shape == (1, 2, 0)
    assert groups.shape == (1, 2, 0, 4)


def test_heads_may_compete_with_entries_of_their_own():
    """As layers do, of which a window leaves some fewer entries."""
    key, logits = torch.zeros(1, 2, 4), torch.zeros(1, 2, 4, 2)
    competes = torch.tensor([[[True] * 4, [False, False, True, True]]])
    costs, budget = EntryCosts(2, 1, 0), torch.tensor([6 * 4])
    keys, groups = best_in_bytes(key, logits, competes, ~competes & False, costs, budget, True)
    assert torch.equal(keys, competes)
    assert torch.equal(groups, competes[..., None].expand_as(groups))


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, costs=COSTS, seed=st.integers(0, 10_000), dtype=DTYPES, pooled=st.booleans())
def test_the_cut_is_the_least_worth_of_what_was_chosen(sizes, costs, seed, dtype, pooled):
    """Entry by entry; no further offer is worth more than it, but where the next one did not fit."""
    key, logits, competes, always = drawn(seed, sizes, dtype=dtype)
    always = always & competes
    budget_B = competes.sum(-1) * (costs.key + sizes[3] * costs.group) // 2
    keys, groups = best_in_bytes(key, logits, competes[:, None], always[:, None], costs, budget_B, pooled)
    found = cut_logit(key, logits, keys & ~always[:, None], groups, costs, pooled)
    for sample in range(sizes[0]):
        heads = [list(range(sizes[1]))] if pooled else [[head] for head in range(sizes[1])]
        for own in heads:
            densities = []
            for head, place in product(own, range(sizes[2])):
                if keys[sample, head, place] and not always[sample, place]:
                    kept = groups[sample, head, place]
                    worth = float(key[sample, head, place].exp() + logits[sample, head, place][kept].exp().sum())
                    densities.append(worth / (costs.key + int(kept.sum()) * costs.group))
            expected = np.log(min(densities) * costs.group) if densities else 0.0
            assert found[sample, own].tolist() == pytest.approx([expected] * len(own), abs=0.02)


def test_nothing_chosen_has_no_cut():
    empty = torch.zeros(2, 3, 0), torch.zeros(2, 3, 0, 4)
    marks = [each.bool() for each in empty]
    assert torch.equal(cut_logit(*empty, *marks, EntryCosts(4, 2, 0), True), torch.zeros(2, 3))
