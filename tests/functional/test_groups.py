"""Value groups: split, expand and product agree with a channel-by-channel reading of both layouts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subtoken_train.functional.groups import apply_group_mask, check_groups, expand_group_mask, split_groups
from tests.support.helpers import random_mask, random_scores

LAYOUTS = ("contiguous", "per_head")


@st.composite
def geometries(draw):
    """(heads, head width, S, layout) with S dividing what the layout splits; any relation of S to the heads."""
    heads, head_dim, layout = draw(st.integers(1, 4)), draw(st.integers(1, 12)), draw(st.sampled_from(LAYOUTS))
    width = heads * head_dim if layout == "contiguous" else head_dim
    num_groups = draw(st.sampled_from([size for size in range(1, width + 1) if width % size == 0]))
    return heads, head_dim, num_groups, layout


def group_of_channel(channel, heads, head_dim, num_groups, layout):
    """The group that rules one channel of the ``v_proj`` output."""
    if layout == "contiguous":
        return channel // (heads * head_dim // num_groups)
    return (channel % head_dim) // (head_dim // num_groups)


@settings(max_examples=50, deadline=None)
@given(geometry=geometries(), seed=st.integers(0, 1000))
def test_split_expand_and_apply_follow_the_channels(geometry, seed):
    heads, head_dim, num_groups, layout = geometry
    value_BND = random_scores(seed, 2, 3, heads * head_dim)
    mask_BNS = random_mask(seed, 2, 3, num_groups)
    owner = [group_of_channel(channel, *geometry) for channel in range(heads * head_dim)]

    groups = split_groups(value_BND, num_groups, heads, layout)
    expanded = expand_group_mask(mask_BNS, heads * head_dim, heads, layout)
    routed = apply_group_mask(value_BND, mask_BNS, heads, layout)
    for group in range(num_groups):
        channels = [channel for channel, own in enumerate(owner) if own == group]
        assert torch.equal(groups[:, :, group], value_BND[:, :, channels])
    for channel, own in enumerate(owner):
        assert torch.equal(expanded[..., channel], mask_BNS[..., own])
        assert torch.equal(routed[..., channel], torch.where(mask_BNS[..., own], value_BND[..., channel], 0.0))


@settings(max_examples=50, deadline=None)
@given(
    geometry=geometries(),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    fills=st.sampled_from([1, 2]),
    scaled=st.booleans(),
)
def test_a_fill_stands_where_a_group_is_dropped(geometry, seed, dtype, fills, scaled):
    """Exactly: a kept group is the value itself, a dropped one the fill; a scaled one lies on the line through both."""
    heads, head_dim, num_groups, layout = geometry
    value_BND, fill_BD = random_scores(seed, 2, 3, heads * head_dim), random_scores(seed + 1, fills, heads * head_dim)
    value_BND, fill_BD = value_BND.to(dtype), fill_BD.to(dtype)
    mask_BNS = random_mask(seed, 2, 3, num_groups)
    factor_BNS = mask_BNS * 1.5 if scaled else mask_BNS
    routed = apply_group_mask(value_BND, factor_BNS, heads, layout, fill_BD)
    assert routed.dtype == dtype
    for channel in range(heads * head_dim):
        group = group_of_channel(channel, *geometry)
        fill_B1, value_BN, kept_BN = fill_BD[:, None, channel], value_BND[..., channel], mask_BNS[..., group]
        own = value_BN * 1.5 - fill_B1 * 0.5 if scaled else value_BN
        assert torch.equal(routed[..., channel], torch.where(kept_BN, own, fill_B1.expand(2, 3)))


@settings(max_examples=50, deadline=None)
@given(geometry=geometries(), seed=st.integers(0, 1000))
def test_gradients_are_those_of_the_repeated_mask_which_is_never_made(geometry, seed):
    heads, head_dim, num_groups, layout = geometry
    width = heads * head_dim
    value, mask = random_scores(seed, 2, 3, width), random_scores(seed + 1, 2, 3, num_groups)
    upstream, kept, gradients = random_scores(seed + 2, 2, 3, width), [], []
    for product in (
        lambda value, mask: apply_group_mask(value, mask, heads, layout),
        lambda value, mask: value * expand_group_mask(mask, width, heads, layout),
    ):
        leaves = value.clone().requires_grad_(), mask.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: kept.append(tensor.numel()) or tensor, lambda x: x
        ):
            result = product(*leaves)
        result.backward(upstream)
        gradients.append([result.detach(), *(leaf.grad for leaf in leaves)])
    assert torch.equal(gradients[0][0], gradients[1][0])
    assert torch.equal(gradients[0][1], gradients[1][1])
    assert torch.allclose(gradients[0][2], gradients[1][2], atol=1e-5)
    assert sorted(kept[:2]) == sorted([value.numel(), mask.numel()])


@pytest.mark.parametrize(
    ("num_groups", "kept", "layout", "words"),
    [
        (24, 1, "contiguous", "num_groups=24 does not divide the value width 128.*4, 8, 16, 32$"),
        (24, 1, "per_head", "num_groups=24 does not divide the value width 32.*4, 8, 16, 32$"),
        (0, 1, "contiguous", "num_groups=0 does not divide the value width 128.*1, 2, 4, 8$"),
        (8, 2, "perhead", r"unknown layout 'perhead'\. Did you mean 'per_head'\? Allowed: contiguous"),
        *((8, kept, "contiguous", f"kept_groups={kept} must lie between 1 and num_groups=8") for kept in (0, -1, 9)),
    ],
)
def test_what_does_not_fit_is_refused_in_words(num_groups, kept, layout, words):
    with pytest.raises(ValueError, match=words):
        check_groups(num_groups, kept, 4, 32, layout)
