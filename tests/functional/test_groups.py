"""Value groups: split, expand and product agree with a channel-by-channel reading of both layouts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.functional.groups import apply_group_mask, check_groups, expand_group_mask, split_groups
from tests.support.helpers import random_mask, random_scores

SEEDS = st.integers(0, 1000)


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


@given(
    geometry=geometries(),
    seed=SEEDS,
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    fills=st.sampled_from([1, 2]),
    scaled=st.booleans(),
)
def test_a_fill_stands_where_a_group_is_dropped(geometry, seed, dtype, fills, scaled):
    """Exactly: a kept group is the value itself, a dropped one the fill; a scaled one lies on the line through both."""
    heads, head_dim, num_groups, layout = geometry
    value, fill = (
        random_scores(seed + i, *lead, heads * head_dim).to(dtype) for i, lead in enumerate([(2, 3), (fills,)])
    )
    mask = random_mask(seed, 2, 3, num_groups)
    routed = apply_group_mask(value, mask * 1.5 if scaled else mask, heads, layout, fill)
    own = value * 1.5 - fill[:, None] * 0.5 if scaled else value
    assert routed.dtype == dtype
    assert torch.equal(routed, torch.where(mask[..., owners(*geometry)], own, fill[:, None].expand_as(own)))


@given(geometry=geometries(), seed=SEEDS)
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
        noting = torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x)
        with noting:
            result = product(*leaves)
        result.backward(upstream)
        gradients.append([result.detach(), *(leaf.grad for leaf in leaves)])
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(*gradients, strict=True))
    assert sorted(kept[:2]) == sorted([value.numel(), mask.numel()])


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
    with pytest.raises(ValueError, match=words):
        check_groups(num_groups, kept, 4, 32, layout)
