"""Choosing and gathering rows, against loops over samples."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subtoken_train.functional.gather import keep_best, kept_index, rank_candidates, take_rows
from tests.support.helpers import random_mask, random_scores

SIZES = st.tuples(st.integers(1, 4), st.integers(1, 9))
SEEDS = st.integers(0, 10_000)


@settings(max_examples=50, deadline=None)
@given(sizes=SIZES, seed=SEEDS, levels=st.sampled_from([None, 1, 3]), bf16=st.booleans(), data=st.data())
def test_keep_best_equals_a_sort_per_sample(sizes, seed, levels, bf16, data):
    scores = random_scores(seed, *sizes, levels=levels, dtype=torch.bfloat16 if bf16 else torch.float32)
    candidates = random_mask(seed, *sizes)
    counts = data.draw(st.lists(st.integers(0, sizes[1] + 1), min_size=sizes[0], max_size=sizes[0]))
    expected = torch.zeros(sizes, dtype=torch.bool)
    for sample, count in enumerate(counts):
        marked = [n for n in range(sizes[1]) if candidates[sample, n]]
        for n in sorted(marked, key=lambda n: (-float(scores[sample, n]), n))[:count]:
            expected[sample, n] = True
    assert torch.equal(keep_best(scores, candidates, torch.tensor(counts)), expected)


@settings(max_examples=50, deadline=None)
@given(sizes=SIZES, seed=SEEDS, levels=st.sampled_from([None, 1, 3]), bf16=st.booleans())
def test_ranks_equal_a_sort_per_sample(sizes, seed, levels, bf16):
    scores = random_scores(seed, *sizes, levels=levels, dtype=torch.bfloat16 if bf16 else torch.float32)
    candidates = random_mask(seed, *sizes)
    rank = rank_candidates(scores, candidates)
    for sample in range(sizes[0]):
        marked = [n for n in range(sizes[1]) if candidates[sample, n]]
        order = sorted(marked, key=lambda n: (-float(scores[sample, n]), n))
        assert [int(rank[sample, n]) for n in order] == list(range(len(order)))
        assert sorted(rank[sample].tolist()) == list(range(sizes[1]))


def test_keep_best_fills_its_count_even_with_minus_infinity():
    scores = torch.full((1, 4), -torch.inf)
    candidates = torch.tensor([[False, True, True, True]])
    assert keep_best(scores, candidates, torch.tensor([2])).tolist() == [[False, True, True, False]]


@settings(max_examples=50, deadline=None)
@given(sizes=SIZES, seed=SEEDS, share=st.sampled_from([0.0, 0.3, 0.7, 1.0]), pad_left=st.booleans())
def test_kept_rows_equal_a_loop(sizes, seed, share, pad_left):
    keep = random_mask(seed, *sizes, share=share)
    rows = [[n for n in range(sizes[1]) if keep[sample, n]] for sample in range(sizes[0])]
    longest = max(map(len, rows))
    index, valid = kept_index(keep, pad_left)
    assert index.shape == valid.shape == (sizes[0], longest)
    for sample, kept in enumerate(rows):
        padding = [0] * (longest - len(kept))
        assert index[sample].tolist() == (padding + kept if pad_left else kept + padding)
        real = [True] * len(kept)
        blank = [False] * len(padding)
        assert valid[sample].tolist() == (blank + real if pad_left else real + blank)


@pytest.mark.parametrize("pad_left", [False, True])
def test_a_sample_may_keep_nothing(pad_left):
    keep = torch.tensor([[False, False, False], [True, False, True]])
    index, valid = kept_index(keep, pad_left)
    assert valid.tolist() == [[False, False], [True, True]]
    assert index.tolist() == [[0, 0], [0, 2]]
    nothing, none_valid = kept_index(torch.zeros(2, 3, dtype=torch.bool), pad_left)
    assert nothing.shape == none_valid.shape == (2, 0)


@settings(max_examples=50, deadline=None)
@given(sizes=SIZES, tail=st.lists(st.integers(1, 3), max_size=2), seed=SEEDS, picks=st.integers(0, 5))
def test_take_rows_equals_a_loop(sizes, tail, seed, picks):
    tensor = random_scores(seed, *sizes, *tail)
    index = random_scores(seed + 1, sizes[0], picks, levels=sizes[1], dtype=torch.int64)
    taken = take_rows(tensor, index)
    assert taken.shape == (sizes[0], picks, *tail)
    for sample in range(sizes[0]):
        for slot in range(picks):
            assert torch.equal(taken[sample, slot], tensor[sample, index[sample, slot]])
