"""What every registered eviction must pass, and those of one layer beside their originals' recorded scores and sets."""

import pytest
import torch

from subtoken_train.evictions import EVICTIONS, build_eviction, notation_names
from subtoken_train.types import Region
from subtoken_train.view.scores import Candidates
from tests.support.golden_cases import close, golden_view, load, same_sets
from tests.support.kvzap_files import settings_for
from tests.support.prompt_views import (
    PROMPTS,
    WITH_IMAGE,
    DenseView,
    by_head,
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


def snapkv(**settings):
    def given(params):
        pooling = params.get("pooling", "avgpool").removesuffix("pool")
        return {"window": params["window_size"], "kernel": params["kernel_size"], "pooling": pooling, **settings}

    return given


def h2o(params):
    group = params.get("gqa_score_agg", "mean")
    return {"recent_share": 0.0, "window": params["window_size"], "group": group}


def sinks(params):
    """KVCache-Factory's class of that name has a fixed window: what it leaves of the capacity is the first entries."""
    found = [params[name] for name in ("n_sink", "sink", "start_size") if name in params]
    return {"sinks": found[0] if found else params["max_capacity_prompt"] - params["window_size"]}


PRESS_H2O = {"recent_share": 0.0, "normalise": True}
CASES = [
    # recording, method, settings, keys, recorded scores (None: sets alone), recorded places
    ("kvpress_knorm", "knorm", {}, "keys", "scores", "kept_positions"),
    ("kvpress_keydiff", "keydiff", {}, "keys", "scores", "kept_positions"),
    ("kvpress_tova", "tova", {"protect_last": True}, "keys", "scores", "kept_positions"),
    ("streamingllm_original", "streaming_llm", sinks, "keys", None, "kept_positions_call"),
    ("streamingllm_original", "streaming_llm", sinks, "keys", None, "kept_positions_evict_for_space_{num_coming}"),
    ("kvpress_streamingllm", "streaming_llm", sinks, "keys", None, "kept_positions"),
    ("streamingllm_adakv", "streaming_llm", sinks, "keys", None, "kept_positions"),
    ("streamingllm_factory", "streaming_llm", sinks, "keys", None, "kept_positions"),
    ("h2o_factory_prompt", "h2o", h2o, "keys_repeated", None, "kept_positions"),
    ("h2o_factory_prompt_kvhead", "h2o", h2o, "keys", None, "kept_positions"),
    ("kvpress_observed_attention", "h2o", PRESS_H2O, "keys", "scores", "kept_positions"),
    # a set per query head: the recording repeats the keys, as the released code does
    ("snapkv_original_avgpool", "snapkv", snapkv(), "keys_repeated", None, "kept_positions"),
    *(
        (f"snapkv_factory_kvhead_{group}", "snapkv", given, "keys", "pooled_scores", "kept_positions")
        for group, given in ((each, snapkv(group=each, pool_per="kv_head")) for each in ("mean", "max"))
    ),
    ("kvpress_snapkv", "snapkv", snapkv(rows="mean"), "keys", "scores", "kept_positions"),
    ("kvpress_snapkv_from_attn", "snapkv", snapkv(rows="mean"), "keys", "scores", "kept_positions"),
]


@pytest.mark.parametrize(("name", "notation", "settings", "keys", "scores", "places"), CASES)
def test_scores_and_sets_are_the_original_s(shared, name, notation, settings, keys, scores, places):
    """Presses score a window, or the last entry, above all others, where here it is protected: these are left out."""
    params, tensors = load(shared, name)
    method = build_eviction(notation, **(settings(params) if callable(settings) else settings))
    view = golden_view(method, tensors, keys)
    if scores is not None:
        theirs = tensors[scores]
        free = theirs.shape[-1]
        if scores == "scores" and notation in ("snapkv", "tova"):
            free -= params["window_size"] if notation == "snapkv" else 1
        ours = method.score(view).scores_BhN[..., :free]
        close(method, f"{name}: scores", ours.expand_as(theirs[..., :free]), theirs[..., :free])
    case = name + places.removeprefix("kept_positions").removesuffix("_{num_coming}").replace("_", " ", 1)
    same_sets(method, case, view, tensors[places.format(**params)])


def test_tova_s_own_code(shared):
    _, tensors = load(shared, "tova_original")
    method, attention = build_eviction("tova"), tensors["attention"]
    view = DenseView(attention, torch.full(attention.shape[::3], int(Region.QUERY)), method.needs, tensors["values"])
    same_sets(method, "tova_original", view, tensors["kept_positions"])
