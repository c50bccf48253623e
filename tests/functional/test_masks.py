"""Group masks: exact budgets, and ties that go to the lower index, against a sort in plain python."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subtoken_train.functional.masks import fixed_mask, global_mask, top_indices

from helpers import random_mask, random_scores

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


def test_everything_ties_to_the_first_groups_and_tokens():
    scores = torch.zeros(1, 3, 4)
    assert fixed_mask(scores, 2)[0].tolist() == [[True, True, False, False]] * 3
    routed = torch.tensor([[False, True, True]])
    expected = [[False] * 4, [True] * 4, [False] * 4]
    assert global_mask(scores, 2, routed)[0].tolist() == expected


def test_scores_that_differ_only_below_bf16_tie():
    fine = torch.tensor([1.0, 1.0 + 2**-12, 1.0 + 2**-11])
    assert fixed_mask(fine.bfloat16()[None, None], 1).tolist() == [[[True, False, False]]]
    assert fixed_mask(fine[None, None], 1).tolist() == [[[False, False, True]]]


def test_all_padding_rows_keep_nothing_and_leave_their_neighbours_alone():
    scores = random_scores(0, 2, 5, 4)
    routed = torch.tensor([[False] * 5, [True] * 5])
    mask = global_mask(scores, 1, routed)
    assert not mask[0].any()
    assert torch.equal(mask[1:], global_mask(scores[1:], 1, routed[1:]))


def test_padding_never_competes_however_high_it_scores():
    scores = random_scores(0, 1, 4, 8)
    routed = torch.tensor([[True, False, True, False]])
    louder = torch.where(routed[..., None], scores, 1e9)
    assert torch.equal(global_mask(scores, 3, routed), global_mask(louder, 3, routed))


@pytest.mark.parametrize("num_groups", [1, 16])
def test_keeping_every_group_keeps_all(num_groups):
    scores, routed = random_scores(0, 2, 3, num_groups), torch.ones(2, 3, dtype=torch.bool)
    assert fixed_mask(scores, num_groups).all()
    assert global_mask(scores, num_groups, routed).all()


def test_single_channels_as_groups_of_one_token():
    """S = d_v, N = 1: the fixed and the global budget are the same."""
    scores = random_scores(3, 4, 1, 128)
    mask = fixed_mask(scores, 32)
    assert (mask.sum(-1) == 32).all()
    assert torch.equal(mask, global_mask(scores, 32, torch.ones(4, 1, dtype=torch.bool)))


def test_minus_infinity_is_a_score_like_any_other():
    """A group that scores -inf is chosen last, but before any group of an unrouted token."""
    scores = torch.full((1, 3, 2), -torch.inf)
    scores[0, 2, 1] = 0.0
    routed = torch.tensor([[False, True, True]])
    assert global_mask(scores, 1, routed)[0].tolist() == [[False, False], [True, False], [False, True]]


def test_top_indices_come_best_first():
    scores = torch.tensor([[3.0, 9.0, 3.0, 9.0, 1.0]])
    assert top_indices(scores, 4).tolist() == [[1, 3, 0, 2]]
