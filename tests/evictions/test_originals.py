"""Methods that score a layer by itself beside their originals' recorded scores and sets, a row for each recording."""

import pytest
import torch

from subtoken_train.evictions import build_eviction
from subtoken_train.types import Region
from tests.support.golden_cases import close, golden_view, load, same_sets
from tests.support.prompt_views import DenseView


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
