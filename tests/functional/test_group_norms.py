"""Norms of groups behind the output projection, against a loop over query heads, and as an offset of logits."""

import statistics

import torch
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.functional.group_norms import contribution_norms, head_grams, standardised_log
from subtoken_train.functional.groups import apply_group_mask
from tests.support.helpers import random_mask, random_scores


def slow_norms(value_BNV, weight, num_kv_heads, head_dim, num_groups, layout):
    """Every query head's columns times the value with only one group left."""
    repeats, norms = weight.shape[1] // (num_kv_heads * head_dim), []
    for group in range(num_groups):
        only = torch.zeros(*value_BNV.shape[:2], num_groups)
        only[..., group] = 1
        heads = apply_group_mask(value_BNV, only, num_kv_heads, layout).split(head_dim, -1)
        columns = weight.split(head_dim, 1)
        norms.append(sum((heads[q // repeats] @ own.T).square().sum(-1) for q, own in enumerate(columns)))
    return torch.stack(norms, -1).sqrt()


@given(
    layout=st.sampled_from(["contiguous", "per_head"]),
    num_kv_heads=st.sampled_from([1, 2, 3, 5]),
    repeats=st.sampled_from([1, 2, 7]),
    head_dim=st.sampled_from([4, 6]),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_equals_the_loop_over_query_heads(layout, num_kv_heads, repeats, head_dim, seed, data):
    """Groups within a head, of a head, of several heads, and across their borders (5 heads of 4 in 2 groups)."""
    width = num_kv_heads * head_dim
    split = width if layout == "contiguous" else head_dim
    num_groups = data.draw(st.sampled_from([size for size in range(1, split + 1) if split % size == 0]))
    value, weight = random_scores(seed, 2, 3, width), random_scores(seed + 1, 10, width * repeats)
    gram = head_grams(weight, num_kv_heads, head_dim, num_groups, layout)
    assert gram.shape == (num_kv_heads, head_dim, head_dim)
    expected = slow_norms(value, weight, num_kv_heads, head_dim, num_groups, layout)
    assert torch.allclose(contribution_norms(value, gram, num_groups, layout), expected, rtol=1e-4, atol=1e-4)


def test_bf16_is_computed_in_fp32_under_autocast():
    value, weight = random_scores(0, 1, 4, 32).bfloat16(), random_scores(1, 32, 64).bfloat16()
    plain = contribution_norms(value.float(), head_grams(weight.float(), 4, 8, 8, "contiguous"), 8, "contiguous")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = contribution_norms(value, head_grams(weight, 4, 8, 8, "contiguous"), 8, "contiguous")
    assert got.dtype == torch.float32
    assert torch.equal(got, plain)


@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 9)),
    seed=st.integers(0, 1000),
    share=st.sampled_from([0.0, 0.5, 1.0]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_an_offset_has_the_statistics_of_each_sample(sizes, seed, share, dtype):
    norms, routed = random_scores(seed, *sizes).exp().to(dtype), random_mask(seed, *sizes[:2], share=share)
    prior = standardised_log(norms, routed)
    assert prior.dtype == torch.float32
    assert not prior[~routed].any()
    for own, found, marks in zip(norms, prior, routed, strict=True):
        if logs := own[marks].float().log().flatten().tolist():
            mean, deviation = statistics.fmean(logs), statistics.pstdev(logs)
            expected = torch.tensor([(log - mean) / max(deviation, 1e-4) for log in logs])
            assert torch.allclose(found[marks].flatten(), expected, atol=1e-3)


def test_equal_and_vanishing_norms_stay_finite():
    routed = torch.ones(1, 2, dtype=torch.bool)
    for norm in (0.0, 3.0):
        assert standardised_log(torch.full((1, 2, 4), norm), routed).abs().max() < 0.02
    assert standardised_log(torch.tensor([[[0.0, 1.0], [2.0, 3.0]]]), routed).isfinite().all()
