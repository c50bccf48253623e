"""Shares of the layers: the budget stays the one that was asked for."""

import pytest
import torch

from subtoken_train.evictions import build_eviction
from subtoken_train.evictions.basic import KNorm
from subtoken_train.evictions.wrappers import PerLayer
from subtoken_train.types import Region
from subtoken_train.view.scores import Candidates
from tests.support.prompt_views import LAYERS, PROMPTS, candidates_of, layer_views


def counts_of(method, keep, prompts=("context",)):
    views = layer_views([PROMPTS[name] for name in prompts], method.needs)
    candidates = candidates_of(method, views, keep)
    return method.counts([method.score(view) for view in views], candidates), candidates


def test_layers_keep_what_they_are_told():
    counts, candidates = counts_of(PerLayer(KNorm(), (3, 2, 1)), 0.4)
    assert candidates.budget_LB[:, 0].tolist() == [10, 10, 10]
    assert counts[:, 0].tolist() == [15, 10, 5]
    assert counts_of(PerLayer(KNorm(), (0.3, 0.2, 0.1)), 0.4)[0][:, 0].tolist() == [15, 10, 5]


def test_kvpress_s_ratios_are_their_complements_at_their_mean():
    """What it keeps of a layer, int(T (1 - c)), where these are whole numbers."""
    ratios = [0.2, 0.6, 0.4]
    regions = torch.full((1, 20), int(Region.CONTEXT))
    views = layer_views([[int(Region.CONTEXT)] * 20], KNorm.needs)
    method = PerLayer(KNorm(), [1 - ratio for ratio in ratios])
    budget = torch.full((LAYERS, 1), round(20 * (1 - sum(ratios) / LAYERS)))
    candidates = Candidates([regions] * LAYERS, [regions > 0] * LAYERS, budget)
    counts = method.counts([method.score(view) for view in views], candidates)
    assert counts[:, 0].tolist() == [16, 8, 12]


def test_what_a_layer_cannot_take_goes_to_the_others_and_none_is_empty():
    counts, candidates = counts_of(PerLayer(KNorm(), (100, 0, 1)), 0.6)
    assert counts[:, 0].tolist() == [25, 1, 19]
    assert int(counts.sum()) == int(candidates.budget_LB.sum())


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ((), r"per_layer needs shares, a number for every layer: 4:3:2:1, or \[4, 3, 2, 1\] in a file"),
        ("4:3", "per_layer needs shares"),
        ([1, -1], "per_layer shares hold -1; every one must be a number of 0 or more"),
        ([1, float("nan")], "per_layer shares hold nan"),
        ([1, 1e308], "per_layer shares hold 1e.308; every one must be a number of 0 or more, at most 1e100"),
        ([1, 10**400], "at most 1e100"),
        ([1, "2"], "per_layer shares hold '2'"),
        ([1, True], "per_layer shares hold True"),
        ([0, 0.0], "per_layer shares are all 0"),
    ],
)
def test_wrong_shares(shares, words):
    with pytest.raises(ValueError, match=words):
        PerLayer(KNorm(), shares)


def test_as_many_shares_as_layers():
    for chain in ("per_layer(knorm)", "ada(per_layer(knorm))"):
        with pytest.raises(ValueError, match="per_layer has 2 shares and the backbone 3 layers; give one each"):
            build_eviction(chain, shares=[1, 2]).check_shape(3, 2, 8)
        build_eviction(chain, shares=[1, 2]).check_shape(2, 2, 8)
