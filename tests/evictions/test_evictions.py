"""What every registered eviction method must pass; settings that suit short prompts stand in ``SETTINGS``."""

import pytest
import torch

from subtoken_train.evictions import EVICTIONS, build_eviction, notation_names
from subtoken_train.types import Region
from subtoken_train.view.scores import Candidates
from tests.support.kvzap_files import settings_for
from tests.support.prompt_views import (
    PROMPTS,
    WITH_IMAGE,
    by_head,
    candidates_of,
    check_budget,
    check_padding,
    layer_views,
    plan,
)

SETTINGS = {
    "snapkv": {"window": 4},
    "pyramidkv": {"window": 4, "beta": 4},
    "chunk": {"length": 1},  # fits any budget; longer ones have their own tests
    "per_layer": {"shares": (3, 1, 2)},
    "compactor": {"sinks": 2, "last": 1, "chunk": 4},
    "lagkv": {"sinks": 1, "lag": 4},
    "duo_attention": {"sinks": 1, "recent": 3},
    "simlayerkv": {"sinks": 1, "recent": 3},
    "cur": {"sinks": 1, "local": 4},
    "cake": {"window": 4},
    "headkv": {"window": 4},
    "sparsemm": {"window": 4},
}


CHAINS = [
    *("ada(snapkv)", "ada(critical(knorm))", "ada(pyramidkv)", "ada(h2o)", "critical(h2o)", "critical(tgv_kv)"),
    *("chunk(snapkv)", "chunk(critical(knorm))", "per_layer(aircache)", "per_layer(ada(vl_cache))", "pooled(h2o)"),
]
"""Wrappers around some of them."""


@pytest.fixture(params=[*EVICTIONS, *CHAINS])
def method(request):
    names = notation_names(request.param)
    settings = {f"{name}.{key}": value for name in names for key, value in SETTINGS.get(name, {}).items()}
    return build_eviction(request.param, **settings, **settings_for(request.param))


@pytest.fixture
def prompts(method):
    return list((WITH_IMAGE if method.needs_image else PROMPTS).values())


def test_padding_neighbours_and_rows_that_are_no_entries_change_nothing(method, prompts):
    check_padding(method, prompts, dropped=[(1, 0.5), (2, 0.9)])


@pytest.mark.parametrize("keep", [0.01, 0.4, 1.0])
def test_budgets_are_met(method, prompts, keep):
    """Every layer and head keeps what the method counts, 1 at least; all layers together no more than the budget."""
    slack = 1000 if method.reads else 0  # what it reads is budgeted, and everything stays
    check_budget(method, prompts, keep, slack, dropped=[(1, 0.5), (2, 0.9)])


def test_layers_that_decide_alone_keep_the_same(method, prompts):
    """Unless a method says that what a layer keeps depends on others, a layer is planned before others have run."""
    for dropped in ([], [(1, 0.5), (2, 0.9)]):
        views = layer_views(prompts, method.needs, "left", dropped=dropped)
        together = plan(method, views, 0.3)[2]
        alone = [plan(method, [view], 0.3)[2][0] for view in views]
        assert method.across_layers or all(map(torch.equal, together, alone))


@pytest.mark.parametrize("scope", ["visual", "all"])
def test_any_scope(method, scope):
    """Whatever a method compresses by default, it can be given other candidates; the rest stays."""
    views = layer_views(list(WITH_IMAGE.values()), method.needs, "right")
    scores = [method.score(view) for view in views]
    regions = [view.regions_BN for view in views]
    competes = [codes == Region.VISUAL if scope == "visual" else codes > 0 for codes in regions]
    budget = torch.stack([each.sum(-1) // 3 for each in competes])
    candidates = Candidates(regions, competes, budget)
    counts, kept = method.counts(scores, candidates), method.keep(scores, candidates)
    for layer, view in enumerate(views):
        assert ((kept[layer] & competes[layer][:, None]).sum(-1) == by_head(counts)[layer]).all()
        assert ((view.entries_BN & ~competes[layer])[:, None] <= kept[layer]).all()
        assert not (kept[layer] & ~view.entries_BN[:, None]).any()


def test_bf16_inputs_score_as_their_values(method, prompts):
    views = layer_views(prompts, method.needs | {"values"}, dtype=torch.bfloat16)
    for view in views:
        wide = [each.float() for each in (view.query_BHNd, view.key_BhNd, view.value_BhNd)]
        query, key, value = wide
        same = view.replaced(query_BHNd=query, key_BhNd=key, value_BhNd=value)
        ours, its = method.score(view).scores_BhN, method.score(same).scores_BhN
        assert ours.dtype == torch.float32
        assert torch.equal(ours, its)


def test_heads_share_a_set_where_a_method_says_so(method, prompts):
    views = layer_views(prompts, method.needs)
    for view, kept in zip(views, plan(method, views, 0.3)[2], strict=True):
        assert kept.shape[1] == (1 if method.heads_share else view.key_BhNd.shape[1])


def test_scores_are_numbers_of_a_shape(method, prompts):
    views = layer_views(prompts, method.needs, "left")
    for view in views:
        found = method.score(view)
        batch, heads, length = found.scores_BhN.shape
        assert (batch, length) == view.regions_BN.shape
        assert heads in {1, view.key_BhNd.shape[1]}
        assert found.scores_BhN.isfinite().all()
        assert found.protected_BN.dtype == torch.bool
        assert not (found.protected_BN & ~view.entries_BN).any()
    assert candidates_of(method, views, 0.5).budget_LB.shape == (len(views), len(prompts))
