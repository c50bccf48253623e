"""One byte budget for keys and groups: against a plain greedy, and at its edges."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.functional.one_budget import best_in_bytes, budget_bytes, cut_logit
from subtoken_train.types import EntryCosts
from tests.support.helpers import random_mask, random_scores

DRAWN = {
    "sizes": st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 7), st.integers(1, 4)),
    "costs": st.builds(EntryCosts, st.integers(1, 20), st.integers(1, 9), st.just(0)),
    "seed": st.integers(0, 10_000),
    "dtype": st.sampled_from([torch.float32, torch.bfloat16]),
    "pooled": st.booleans(),
}


def drawn(seed, sizes, levels=None, dtype=torch.float32):
    batch, heads, length, groups = sizes
    key = random_scores(seed, batch, heads, length, levels=levels, dtype=dtype)
    logits = random_scores(seed + 1, batch, heads, length, groups, levels=levels, dtype=dtype)
    competes = random_mask(seed + 2, batch, length)
    return key, logits, competes, competes & random_mask(seed + 3, batch, length, share=0.2)


def pools(heads, pooled):
    return [range(heads)] if pooled else [[head] for head in range(heads)]


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
    kept, left, fits = {}, budget, True
    for _, place, number, cost, groups in sorted(offers, key=lambda offer: offer[:3]):
        fits = fits and cost <= left
        if fits or (number and place in kept and cost <= left):
            kept.setdefault(place, []).extend(groups)
            left -= cost
    return kept


def slow_best(key, logits, competes, always, costs, budget_B, pooled):
    keys, groups = torch.zeros_like(key, dtype=torch.bool), torch.zeros_like(logits, dtype=torch.bool)
    for sample, own in product(range(len(key)), pools(key.shape[1], pooled)):
        places = [(head, n) for n in competes[sample].nonzero()[:, 0].tolist() for head in own]
        every = torch.cat([key[sample][..., None], logits[sample]], -1).float()
        worth = (every - max((every[place].max() for place in places), default=0)).clamp(max=0).exp().tolist()
        entries = [(worth[h][n][0], worth[h][n][1:], bool(always[sample, n])) for h, n in places]
        for place, kept in slow_pool(entries, costs, int(budget_B[sample])).items():
            keys[(sample, *places[place])] = True
            groups[(sample, *places[place])][kept] = True
    return keys, groups


@given(levels=st.sampled_from([None, 1, 2, 4]), share=st.fractions(0, 1), **DRAWN)
def test_equals_the_plain_greedy(sizes, costs, seed, levels, dtype, pooled, share):
    key, logits, competes, always = drawn(seed, sizes, levels, dtype)
    budget_B = budget_bytes(competes.sum(-1), (costs.key + sizes[3] * costs.group) * (sizes[1] if pooled else 1), share)
    found = best_in_bytes(key, logits, competes[:, None], always[:, None], costs, budget_B, pooled)
    for own, expected in zip(found, slow_best(key, logits, competes, always, costs, budget_B, pooled), strict=True):
        assert torch.equal(own, expected)


def test_infinite_and_far_logits_are_ranked():
    key, logits = torch.tensor([[[-torch.inf, 1e4, torch.inf]]]), torch.full((1, 1, 3, 2), -torch.inf)
    every = torch.ones(1, 1, 3, dtype=torch.bool)
    keys, _ = best_in_bytes(key, logits, every, ~every, EntryCosts(1, 1, 0), torch.tensor([1]), True)
    assert keys[0, 0].tolist() == [False, False, True]


def test_no_entries_and_nothing_chosen():
    none, costs = (torch.zeros(1, 2, 0), torch.zeros(1, 2, 0, 4)), EntryCosts(1, 1, 0)
    marks = torch.zeros(1, 1, 0, dtype=torch.bool)
    found = best_in_bytes(*none, marks, marks, costs, torch.tensor([0]), True)
    assert [each.shape for each in found] == [(1, 2, 0), (1, 2, 0, 4)]
    assert torch.equal(cut_logit(*none, *found, costs, True), torch.zeros(1, 2))


@given(**DRAWN)
def test_the_cut_is_the_least_worth_of_what_was_chosen(sizes, costs, seed, dtype, pooled):
    key, logits, competes, always = drawn(seed, sizes, dtype=dtype)
    budget_B = competes.sum(-1) * (costs.key + sizes[3] * costs.group) // 2
    keys, groups = best_in_bytes(key, logits, competes[:, None], always[:, None], costs, budget_B, pooled)
    chosen = keys & ~always[:, None]
    found = cut_logit(key, logits, chosen, groups, costs, pooled)
    for sample, own in product(range(sizes[0]), pools(sizes[1], pooled)):
        densities = []
        for head, place in product(own, range(sizes[2])):
            if chosen[sample, head, place]:
                kept = groups[sample, head, place]
                worth = float(key[sample, head, place].exp() + logits[sample, head, place][kept].exp().sum())
                densities.append(worth / (costs.key + int(kept.sum()) * costs.group))
        expected = np.log(min(densities) * costs.group) if densities else 0.0
        assert found[sample, own].tolist() == pytest.approx([expected] * len(own), abs=0.02)
