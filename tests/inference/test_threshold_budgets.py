"""A threshold in the place of a budget: packed and recomputed, in chunks, in batches, while decoding, in the report."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from subtoken_train.cache.cache import PackedCache
from subtoken_train.evictions import EVICTIONS, build_eviction
from subtoken_train.evictions.thresholds import Threshold
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.model import SubTokenModel
from subtoken_train.inference.prefill import open_prompts
from subtoken_train.types import Region
from tests.support.helpers import only_sample
from tests.support.online_truth import decoded_online, largest_difference
from tests.support.sampling import sampled
from tests.support.truth_cells import PLAIN_CELL, backbone_of, batch_of, from_truth

SETTINGS = {"snapkv": {"rows": "mean", "window": 3, "kernel": 3}, "expected_attention": {"sinks": 1, "future": 8}}
VALUES = {"random": 0.6, "keydiff": -0.2, "kvzip": -2.4, "tova": -3.0, "snapkv": -3.1, "expected_attention": -2.9}
"""Methods with absolute scores, and what leaves some of the tiny models' entries in most heads."""
WINDOW = 3


def compression_of(name: str, **changed) -> Compression:
    method = build_eviction(name, **SETTINGS.get(name, {}))
    return Compression(method, **{"threshold": Threshold(VALUES[name], WINDOW), **changed})


def cell_of(**levels: str) -> dict[str, str]:
    return {**PLAIN_CELL, "batch": "three_left", "protocol": "query_aware", **levels}


def test_all_methods_with_absolute_scores_are_tried():
    """But those that read a calibration, which are tried where theirs is made, and SimLayerKV's whole layers."""
    methods = [EVICTIONS.find(name)() for name in EVICTIONS]
    absolute = {each.name for each in methods if each.absolute is not None and not hasattr(each, "calibration")}
    assert absolute | {"snapkv"} == {*VALUES, "simlayerkv"}
    assert build_eviction("pyramidkv", rows="mean").absolute is None


@sampled("name", VALUES, every=2)
@sampled("protocol", ["query_aware", "context_first"], every=2)
@sampled("batch", ["one", "three_left", "three_right"], every=3)
@sampled("model", ["llama", "llama routed", "qwen2 int8", "llava_gqa"], every=3)
def test_packed_decoding_is_the_eager_recompute(name, protocol, batch, model):
    family, _, more = model.partition(" ")
    cell = cell_of(family=family, batch=batch, selector="linear" if more == "routed" else "none")
    precision = {"kv_dtype": "int8"} if more == "int8" else {}
    found = from_truth(backbone_of(cell), batch_of(cell), 4, compression_of(name, **precision), protocol)
    assert found.fits("int8" if precision else "fp32"), found


@pytest.mark.parametrize("protocol", ["query_aware", "context_first"])
def test_a_prompt_keeps_in_a_batch_what_it_keeps_alone(protocol):
    backbone, batch = backbone_of(cell_of()), batch_of(cell_of())
    compression = compression_of("keydiff")

    def held(prompts, sample):
        cache = PackedCache(backbone.family.shape.num_layers)
        plan = open_prompts(backbone, prompts, cache, compression, protocol).plan
        counts = [layer.heads_BNh[sample].sum(0).tolist() for layer in plan.layers]
        assert len({count for layer in counts for count in layer}) > 1
        return counts

    for sample in range(3):
        assert held(batch, sample) == held(only_sample(batch, sample), 0)


@sampled("name", ["snapkv", "tova"], every=1)
@sampled("protocol", ["query_aware", "context_first"], every=1)
@sampled("model", ["llama", "llama routed", "llava_gqa"], every=2)
def test_while_decoding_older_entries_go_and_logits_are_the_truth(name, protocol, model):
    family, _, more = model.partition(" ")
    cell = cell_of(family=family, selector="linear" if more else "none")
    backbone = backbone_of(cell)
    run = decoded_online(backbone, batch_of(cell), 18, compression_of(name, every=4), protocol)
    largest, same = largest_difference(backbone, run)
    assert (largest < 1e-4, same) == (True, True)
    assert run.cache.evictor.evictions > 2
    for layer in run.cache.layers:
        state = layer.eviction_state
        seen_R = state.seen_B.repeat_interleave(len(state.place_RM) // len(state.seen_B))
        assert bool(((state.place_RM >= (seen_R - WINDOW)[:, None]).sum(-1) == WINDOW).all())
    wide = compression_of(name, threshold=Threshold(-0.5, 200), every=4)
    run = decoded_online(backbone, batch_of(cell), 12, wide, protocol)
    assert run.cache.evictor.evictions == 0  # nothing goes that is recent


@pytest.mark.parametrize("protocol", ["query_aware", "context_first"])
@pytest.mark.parametrize(("value", "words"), [(-1e-6, "none of the entries of 'prompt"), (-1e3, "all of the entries")])
def test_nothing_or_all_is_refused(protocol, value, words):
    backbone, batch = backbone_of(cell_of()), batch_of(cell_of())
    batch = replace(batch, record_ids=[f"prompt {place}" for place in range(3)])
    compression = Compression(build_eviction("kvzip"), threshold=Threshold(value, 2))
    with pytest.raises(ValueError, match=rf"keeps {words}.*older than the last 2 positions"):
        open_prompts(backbone, batch, PackedCache(backbone.family.shape.num_layers), compression, protocol)
    within = Compression(build_eviction("kvzip"), threshold=Threshold(value, 1000))  # little is decided
    assert open_prompts(backbone, batch, PackedCache(backbone.family.shape.num_layers), within, protocol).plan.layers


def test_the_report_says_what_each_prompt_keeps():
    backbone, batch = backbone_of(cell_of()), batch_of(cell_of())
    model = SubTokenModel.around(backbone, compression_of("keydiff"))
    inputs = {"input_ids": batch.input_ids_BN, "attention_mask": batch.regions_BN != Region.PADDING}
    model.generate(**inputs, max_new_tokens=2, context_length=20, do_sample=False)
    report = model.cache_report()
    assert len(report.shares) == 3
    mean, deviation = statistics.fmean(report.shares), statistics.stdev(report.shares)
    words = f"measured: a threshold promises none; {mean:.4%} ± {deviation:.4%} of each of 3 prompts"
    kept = f"{report.kept_entries:.1%} of its entries"
    assert f"compressed region {report.realised_fraction:.4%} of its KV ({kept}; {words})" in str(report)
    assert min(report.shares) <= report.realised_fraction <= max(report.shares)
    budget = SubTokenModel.around(backbone, Compression(build_eviction("keydiff"), 0.5))
    budget.generate(**inputs, max_new_tokens=2, context_length=20, do_sample=False)
    assert budget.cache_report().shares == []
    assert "threshold" not in str(budget.cache_report())
