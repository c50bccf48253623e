"""Choosing, gathering and averaging rows, against loops over samples."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subtoken_train.functional.gather import keep_best, kept_index, masked_mean, rank_candidates, take_rows
from tests.support.helpers import random_mask, random_scores

SIZES = st.tuples(st.integers(1, 4), st.integers(1, 9))
SEEDS = st.integers(0, 10_000)


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


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 5)),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_mean_is_that_of_a_loop(sizes, seed, dtype):
    rows, mask = random_scores(seed, *sizes).to(dtype), random_mask(seed, *sizes[:2])
    found = masked_mean(rows, mask)
    assert found.dtype == torch.float32
    for sample in range(sizes[0]):
        own = [rows[sample, n].double() for n in range(sizes[1]) if mask[sample, n]]
        expected = sum(own) / len(own) if own else torch.zeros(sizes[2], dtype=torch.double)
        assert torch.allclose(found[sample].double(), expected, atol=1e-5)


def test_only_marked_rows_get_a_gradient_and_autocast_lowers_nothing():
    rows = random_scores(0, 1, 3, 2).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mean = masked_mean(rows, torch.tensor([[True, False, True]]))
    assert torch.equal(mean, (rows[:, 0] + rows[:, 2]) / 2)
    mean.sum().backward()
    assert torch.equal(rows.grad[0, :, 0], torch.tensor([0.5, 0.0, 0.5]))
