"""Merging into the nearest kept entry, against a plain loop and Elastic Cache's and PrefixKV's recorded outputs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.functional.merging import joined_means, nearest_anchor
from tests.support.golden_cases import close, load


class Named:
    name = "elastic"


def nearest_by_loop(anchors, entries):
    """One row at a time: distance in entries, the earlier of two that are as near."""
    places = [row for row in range(len(entries)) if entries[row]]
    found = list(range(len(entries)))
    takers = [row for row in places if anchors[row]]
    for row in places if takers else []:
        found[row] = min(takers, key=lambda taker: abs(places.index(taker) - places.index(row)))
    return found


def random_marks(seed, *shape, share=0.4):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


@given(st.integers(1, 20), st.integers(0, 10**6), st.floats(0.05, 0.95))
def test_nearest_equals_a_plain_loop(length, seed, share):
    entries = random_marks(seed, 2, length, share=0.8)
    anchors = random_marks(seed + 1, 2, 3, length, share=share) & entries[:, None]
    found = nearest_anchor(anchors, entries)
    for sample in range(2):
        for head in range(3):
            assert found[sample, head].tolist() == nearest_by_loop(anchors[sample, head], entries[sample])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_means_equal_a_plain_loop(dtype):
    states = torch.randn(2, 3, 9, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    target = torch.randint(0, 9, (2, 3, 9), generator=torch.Generator().manual_seed(1))
    joined = joined_means(states, target)
    for sample, head, row in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(9)).tolist():
        members = states[sample, head][target[sample, head] == row].float()
        expected = members.mean(0).to(dtype) if len(members) else states[sample, head, row]
        torch.testing.assert_close(joined[sample, head, row], expected)


def test_a_shared_set_serves_every_head_and_an_entry_alone_is_not_rounded():
    states = torch.randn(1, 2, 6, 4).bfloat16()
    entries = torch.ones(1, 6, dtype=torch.bool)
    anchors = torch.tensor([[[1, 0, 0, 0, 1, 1]]], dtype=torch.bool)
    target = nearest_anchor(anchors, entries)
    assert target.tolist() == [[[0, 0, 0, 4, 4, 5]]]  # row 2 is as near to both
    joined = joined_means(states, target)
    assert torch.equal(joined[:, :, 5], states[:, :, 5])
    torch.testing.assert_close(joined[:, :, 4], states[:, :, 3:5].float().mean(2).bfloat16())


def test_elastic_as_released_joins_the_same_way(shared):
    """Its ranking is a bug (``argsort`` taken for a rank, dropped places without the offset); the joining is ours."""
    params, tensors = load(shared, "elasticcache_as_released")
    start, length = params["start_size"], params["T"]
    forget = int(length - length * (1 - params["ratio"]))
    for layer in range(params["L"]):
        order = tensors["score_sum"][layer, start : length - 1].argsort()
        kept = (order > forget).nonzero()[:, 0] + start
        dropped = (order <= forget).nonzero()[:, 0]  # the bug: ``start`` is not added
        target = torch.arange(length)
        target[dropped] = kept[(kept[None] - dropped[:, None]).abs().argmin(1)]
        # by the bug a row can be dropped and kept: it stays where it is, and a copy of it goes elsewhere
        both = torch.isin(dropped, kept)
        moved = torch.cat([torch.arange(length), dropped[both]])
        goes = torch.arange(length).index_copy(0, dropped[~both], target[dropped[~both]])
        goes = torch.cat([goes, target[dropped[both]]])
        out = torch.cat([torch.arange(start), kept, torch.tensor([length - 1])])
        for name in ("keys", "values"):
            states = tensors[name][layer][:, :, moved]
            joined = joined_means(states, goes[None, None])
            close(
                Named,
                f"elasticcache_as_released: {name} joined",
                joined[:, :, out],
                tensors[f"{name}_out_layer{layer}"],
            )
