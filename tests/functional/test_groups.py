"""Value groups: both layouts channel by channel, and norms of groups behind the output projection."""

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.functional import masks
from subtoken_train.functional.groups import check_groups, expand_group_mask, split_groups
from subtoken_train.functional.masks import apply_group_mask, contribution_norms, head_grams, standardised_log
from tests.support.helpers import random_mask, random_scores
from tests.support.refusals import refuses

SEEDS, DTYPES = st.integers(0, 1000), st.sampled_from([torch.float32, torch.bfloat16])


@st.composite
def geometries(draw):
    """(heads, head width, S, layout) with S dividing what the layout splits; any relation of S to the heads."""
    heads, head_dim = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    layout = draw(st.sampled_from(["contiguous", "per_head"]))
    width = heads * head_dim if layout == "contiguous" else head_dim
    num_groups = draw(st.sampled_from([size for size in range(1, width + 1) if width % size == 0]))
    check_groups(num_groups, num_groups, heads, head_dim, layout)
    return heads, head_dim, num_groups, layout


def owners(heads, head_dim, num_groups, layout):
    """The group that rules each channel of the ``v_proj`` output."""
    split = heads * head_dim if layout == "contiguous" else head_dim
    return [channel % split // (split // num_groups) for channel in range(heads * head_dim)]


@given(geometry=geometries(), seed=SEEDS)
def test_split_expand_and_apply_follow_the_channels(geometry, seed):
    heads, head_dim, num_groups, layout = geometry
    value_BND, mask_BNS = random_scores(seed, 2, 3, heads * head_dim), random_mask(seed, 2, 3, num_groups)
    owner = torch.tensor(owners(*geometry))
    groups = split_groups(value_BND, num_groups, heads, layout)
    for group in range(num_groups):
        assert torch.equal(groups[:, :, group], value_BND[:, :, owner == group])
    expanded = mask_BNS[..., owner]
    assert torch.equal(expand_group_mask(mask_BNS, heads * head_dim, heads, layout), expanded)
    assert torch.equal(apply_group_mask(value_BND, mask_BNS, heads, layout), torch.where(expanded, value_BND, 0.0))


@given(geometries(), SEEDS)
def test_a_product_has_the_gradients_of_its_steps(geometry, seed):
    heads, head_dim, num_groups, layout = geometry
    mask, learns = (random_mask(seed, 2, 3, width) for width in (num_groups, 1))
    value, logits = (random_scores(seed, 2, 3, width).requires_grad_() for width in (heads * head_dim, num_groups))
    fused = apply_group_mask(value, mask, heads, layout, slope=(logits, learns))
    steps = value * masks.straight_through(mask, logits, learns)[..., owners(*geometry)]
    torch.testing.assert_close(*(torch.autograd.grad(each, (value, logits), each.detach()) for each in (fused, steps)))


@given(geometries(), SEEDS, DTYPES, st.sampled_from([1, 2]), st.booleans())
def test_a_fill_stands_where_a_group_is_dropped(geometry, seed, dtype, fills, scaled):
    """Exactly: a kept group is the value itself, a dropped one the fill; a scaled one lies on the line through both."""
    heads, head_dim, num_groups, layout = geometry
    value, fill = (random_scores(seed + i, *a, heads * head_dim).to(dtype) for i, a in enumerate([(2, 3), (fills,)]))
    mask = random_mask(seed, 2, 3, num_groups)
    routed = apply_group_mask(value, mask * 1.5 if scaled else mask, heads, layout, fill)
    own = value * 1.5 - fill[:, None] * 0.5 if scaled else value
    assert routed.dtype == dtype
    assert torch.equal(routed, torch.where(mask[..., owners(*geometry)], own, fill[:, None].expand_as(own)))


REFUSED = {
    "contiguous": ((24, 1, "contiguous"), "num_groups=24 does not divide the value width 128.*4, 8, 16, 32$"),
    "per_head": ((24, 1, "per_head"), "num_groups=24 does not divide the value width 32.*4, 8, 16, 32$"),
    "none": ((0, 1, "contiguous"), "num_groups=0 does not divide the value width 128.*1, 2, 4, 8$"),
    "layout": ((8, 2, "perhead"), r"unknown layout 'perhead'\. Did you mean 'per_head'\? Allowed: contiguous"),
    **{
        f"kept {kept}": ((8, kept, "contiguous"), f"kept_groups={kept} must lie between 1 and num_groups=8")
        for kept in (0, -1, 9)
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_in_words(name):
    (num_groups, kept, layout), words = REFUSED[name]
    refuses(words, check_groups, num_groups, kept, 4, 32, layout)


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
    st.sampled_from(["contiguous", "per_head"]), st.sampled_from([1, 2, 3, 5]), st.sampled_from([1, 2, 7]),
    st.sampled_from([4, 6]), SEEDS, st.data(),
)  # fmt: skip
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


@given(st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 9)), SEEDS, st.sampled_from([0, 0.5, 1]), DTYPES)
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
