"""Choosing, gathering and averaging rows, against loops over samples; hashes and digests."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.functional.gather import kept_index, masked_mean, rank_candidates
from subtoken_train.functional.hashing import sample_seeds, uniform_hash
from tests.support.helpers import random_mask, random_scores

SIZES, SEEDS = st.tuples(st.integers(1, 4), st.integers(1, 9)), st.integers(0, 10_000)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
KEYS = st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=5)


@given(sizes=SIZES, seed=SEEDS, levels=st.sampled_from([None, 1, 3]), dtype=DTYPES)
def test_ranks_equal_a_sort_per_sample(sizes, seed, levels, dtype):
    scores, candidates = random_scores(seed, *sizes, levels=levels, dtype=dtype), random_mask(seed, *sizes)
    rank = rank_candidates(scores, candidates)
    for sample in range(sizes[0]):
        marked = candidates[sample].nonzero()[:, 0].tolist()
        order = sorted(marked, key=lambda n, own=scores[sample]: (-float(own[n]), n))
        assert [int(rank[sample, n]) for n in order] == list(range(len(order)))
        assert sorted(rank[sample].tolist()) == list(range(sizes[1]))


@given(sizes=SIZES, seed=SEEDS, share=st.sampled_from([0.0, 0.3, 0.7, 1.0]), pad_left=st.booleans())
def test_kept_rows_equal_a_loop(sizes, seed, share, pad_left):
    keep = random_mask(seed, *sizes, share=share)
    rows = [own.nonzero()[:, 0].tolist() for own in keep]
    index, valid = kept_index(keep, pad_left)
    assert index.shape == valid.shape == (sizes[0], max(map(len, rows)))
    for own, real, kept in zip(index.tolist(), valid.tolist(), rows, strict=True):
        padding = [None] * (len(own) - len(kept))
        wanted = padding + kept if pad_left else kept + padding
        assert real == [row is not None for row in wanted]
        assert own == [row or 0 for row in wanted]


@given(sizes=st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 5)), seed=SEEDS, dtype=DTYPES)
def test_the_mean_is_that_of_a_loop(sizes, seed, dtype):
    rows, mask = random_scores(seed, *sizes).to(dtype), random_mask(seed, *sizes[:2])
    found = masked_mean(rows, mask)
    assert found.dtype == torch.float32
    for own, marks, mean in zip(rows, mask, found, strict=True):
        expected = own[marks].double().mean(0) if marks.any() else torch.zeros(sizes[2], dtype=torch.double)
        assert torch.allclose(mean.double(), expected, atol=1e-5)


def test_only_marked_rows_get_a_gradient_and_autocast_lowers_nothing():
    rows = random_scores(0, 1, 3, 2).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mean = masked_mean(rows, torch.tensor([[True, False, True]]))
    assert torch.equal(mean, (rows[:, 0] + rows[:, 2]) / 2)
    mean.sum().backward()
    assert torch.equal(rows.grad[0, :, 0], torch.tensor([0.5, 0.0, 0.5]))


@given(keys=KEYS, others=st.lists(st.integers(0, 2**31), max_size=4), data=st.data())
def test_a_number_depends_on_its_own_keys_only(keys, others, data):
    """Whatever else stands in the batch, and however the keys are broadcast."""
    alone = uniform_hash(torch.tensor(keys[0]), *keys[1:])
    assert 0 <= alone.item() < 1
    place = data.draw(st.integers(0, len(others)))
    assert uniform_hash(torch.tensor([*others[:place], keys[0], *others[place:]]), *keys[1:])[place] == alone
    assert uniform_hash(*[torch.tensor([[key]]) for key in keys]).item() == alone.item()


def test_uniform_over_consecutive_keys():
    """Small consecutive integers, as positions and groups are: mean, and chi-square over 64 bins."""
    sample, position, group = torch.arange(5)[:, None, None], torch.arange(600)[:, None], torch.arange(32)
    numbers = uniform_hash(sample, position, group, 7, 3).flatten()
    assert abs(numbers.mean().item() - 0.5) < 0.005
    observed = torch.histc(numbers, 64, 0, 1)
    expected = len(numbers) / 64
    assert 20 < ((observed - expected) ** 2 / expected).sum().item() < 130  # 63 +- 11 for uniform numbers


def test_all_zero_keys_are_no_special_case():
    """The first group of the first layer under seed 0 must not be the lowest by construction."""
    zeros = [uniform_hash(torch.tensor(0), *[0] * more).item() for more in range(4)]
    assert len(set(zeros)) == 4
    assert min(zeros) > 0


def test_sample_seeds_follow_the_records_names():
    device = torch.device("cpu")
    seeds = sample_seeds(["a", "b", "a"], device)
    assert seeds.dtype == torch.int64
    assert seeds[0] == seeds[2] != seeds[1]
    assert torch.equal(sample_seeds(["b", "a"], device), seeds[1:])
    assert len(set(sample_seeds([f"record-{i}" for i in range(500)], device).tolist())) == 500
