"""StreamingLLM: equal to the released cache's choice; budgets around the sinks."""

import pytest
import torch

from subtoken_train.evictions import build_eviction
from subtoken_train.types import Region
from subtoken_train.view.scores import Candidates
from tests.support.golden_cases import golden_view, keep_of, load, same_places
from tests.support.prompt_views import layer_views


@pytest.mark.parametrize("call", ["call", "evict_for_space"])
def test_golden_original(shared, call):
    """Which entries stay; how they are turned: ``tests/inference/test_rerotation.py``."""
    params, tensors = load(shared, "streamingllm_original")
    method = build_eviction("streaming_llm", sinks=params["start_size"])
    suffix = "" if call == "call" else f"_{params['num_coming']}"
    places = tensors[f"kept_positions_{call}{suffix}"]
    kept = keep_of(method, [golden_view(method, tensors)], places.shape[-1])
    same_places(method, f"streamingllm_original {call}", kept[0], places)


@pytest.mark.parametrize(
    ("name", "sinks"),
    [
        ("kvpress_streamingllm", lambda params: params["n_sink"]),
        ("streamingllm_adakv", lambda params: params["sink"]),
        ("streamingllm_factory", lambda params: params["max_capacity_prompt"] - params["window_size"]),
    ],
)
def test_golden_other_code(shared, name, sinks):
    """The press and AdaKV's variant have as many sinks; KVCache-Factory's class of that name has a fixed window.

    All that the window leaves of its capacity are the first entries, here ``sinks = capacity - window``.
    """
    params, tensors = load(shared, name)
    method = build_eviction("streaming_llm", sinks=sinks(params))
    places = tensors["kept_positions"]
    kept = keep_of(method, [golden_view(method, tensors)], places.shape[-1])
    same_places(method, name, kept[0], places)


@pytest.mark.parametrize(
    ("sinks", "count", "places"),
    [
        (4, 6, [0, 1, 2, 3, 8, 9]),
        (0, 3, [7, 8, 9]),
        (4, 4, [0, 1, 2, 3]),
        (4, 2, [2, 3]),
        (20, 3, [7, 8, 9]),
        (4, 0, [3]),
    ],
)
def test_budgets_around_the_sinks(sinks, count, places):
    method = build_eviction("streaming_llm", sinks=sinks)
    view = layer_views([[int(Region.QUERY)] * 10], method.needs, layers=1)[0]
    assert keep_of(method, [view], count)[0][0, 0].nonzero()[:, 0].tolist() == places


def test_sinks_are_the_prompts_first_entries():
    """Where only the image competes, the system tokens are the sinks, and the latest visual tokens stay."""
    codes = [int(Region.SYSTEM)] * 4 + [int(Region.VISUAL)] * 8 + [int(Region.QUERY)] * 3
    method = build_eviction("streaming_llm")
    view = layer_views([codes], method.needs, pad="left", layers=1)[0]
    competes = view.regions_BN == Region.VISUAL
    kept = method.keep([method.score(view)], Candidates([view.regions_BN], [competes], torch.tensor([[3]])))[0]
    assert kept[0, 0].nonzero()[:, 0].tolist() == [3, 4, 5, 6, 12, 13, 14, 15, 16, 17]
