"""What a compression accepts and promises; budgets in fractions, tokens and bytes, and thresholds in their place."""

import statistics
from dataclasses import replace

import pytest
import torch

from subtoken_train.cache.cache import PackedCache
from subtoken_train.evictions import EVICTIONS, build_eviction
from subtoken_train.evictions.thresholds import Threshold
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.model import SubTokenModel
from subtoken_train.inference.prefill import open_prompts, prefill
from subtoken_train.inference.prompt_inputs import batch_from_inputs
from subtoken_train.types import Region
from tests.support.helpers import FirstEntries, FirstVisual, compress, make_batch
from tests.support.online_truth import decoded_online, largest_difference
from tests.support.prompt_views import settings_for
from tests.support.refusals import refuses, refusing
from tests.support.sampling import sampled
from tests.support.text_families import text_batch, text_family
from tests.support.truth_cells import PLAIN_CELL, backbone_of, batch_of, from_truth

PER_HEAD = {name for name in EVICTIONS if not EVICTIONS[name]().heads_share}
"""Methods whose heads keep entries of their own, so that a layer holds more entries than its budget of each head."""
FREEING = sorted(name for name in EVICTIONS if not EVICTIONS[name].reads)

TOKENS = {"keep": 16, "unit": "tokens"}
test_wrong_settings = refusing(
    [
        ({"keep": 0.0}, r"eviction_keep=0.0 must lie in \(0, 1\]; 0.1 keeps a tenth"),
        ({"keep": float("nan"), "unit": "bytes"}, "must be a whole number of at least 1, and at most 9,007"),
        ({"keep": "0.5"}, "eviction_keep='0.5' must be a number; 0.1 keeps"),
        ({"rerotate": "no"}, "rerotate='no' must be true or false"),
        ({"rerotate": True, "eviction": build_eviction("quest_steps")}, "'quest_steps': that evicts nothing"),
        ({"unit": "token"}, "unknown unit of eviction_keep 'token'. Did you mean 'tokens'"),
        ({"kv_dtype": "int9"}, "unknown kv_dtype 'int9'. Did you mean"),
        ({"kv_dtype": "int4_rotated", "key_channels": 0.5}, "key_channels=0.5 does not go with kv_dtype int4_rotated"),
        ({"kv_dtype": "kivi4", "eviction": build_eviction("quest_steps")}, "kv_dtype kivi4: there the keys of 32"),
        (TOKENS | {"kv_dtype": "kivi2", "eviction": build_eviction("snapkv"), "every": 8}, "every=8 .* kivi2: there"),
        ({"scope": "visula"}, "unknown scope 'visula'. Did you mean 'visual'"),
        ({"key_channels": 0.0}, r"key_channels=0.0 must lie in \(0, 1\]; 0.6 keeps 60 % of each key's channels"),
        ({"key_axes": "pca"}, "key_axes='pca' turns keys to cut channels; give key_channels"),
        ({"merge": "pivots"}, "unknown merge 'pivots'. Did you mean 'pivot'"),
        ({"eviction": None, "merge": "pivot"}, "merge 'pivot' needs an eviction method"),
        ({"key_window": 0}, "key_window=0 must be at least 1"),
        ({"eviction": None, "keep": 0.5}, "eviction_keep=0.5 needs an eviction method"),
        ({"prefill_chunk": 0}, "prefill_chunk=0 must be a whole number of at least 1, for instance 4096"),
        ({"prefill_chunk": 63, "eviction": build_eviction("snapkv")}, "prefill_chunk=63 is smaller than the 64 rows"),
        ({"prefill_chunk": 64, "eviction": build_eviction("ada(pyramidkv)")}, r"'ada\(pyramidkv\)': it divides"),
        ({"prefill_chunk": 64, "eviction": build_eviction("kvzip", pool="layer")}, "'kvzip': it runs a prompt twice"),
        ({"rerotate": True, "merge": "pivot"}, "rerotate does not go with merge 'pivot': a key is rotated by its"),
        ({"rerotate": True, "key_channels": 0.5}, "rerotate does not go with key_channels=0.5: pairs of"),
        ({"rerotate": True, "eviction": None}, "rerotate needs an eviction; use streaming_llm"),
        ({"rerotate": True, "eviction": build_eviction("pyramidkv")}, "equally many entries must stay in every layer"),
    ],
    lambda settings: Compression(**{"eviction": FirstEntries(), **settings}),
)

WIDTH = text_family().shape.head_dim
UNFIT = {
    "image": ({"eviction": FirstVisual()}, r"'first_visual' reads the attention between text and image and a language"),
    "scope": ({"eviction": FirstEntries(), "scope": "visual"}, r"scope 'visual': a .* sees no images; use scope"),
    "width": ({"key_channels": 1 - 1 / WIDTH, "kv_dtype": "int4"}, rf"keeps {WIDTH - 1} of {WIDTH}; use .* kv_dtype"),
}


@pytest.mark.parametrize(("settings", "words"), UNFIT.values(), ids=UNFIT)
def test_what_does_not_fit_a_language_model_is_refused(settings, words):
    refuses(words, lambda: Compression(**settings).check(text_family()))
    served = {"eviction": FirstEntries(), "scope": "context", "kv_dtype": "int8"}
    Compression(**(settings | served)).check(text_family())


def test_methods_for_images_are_refused_without_one(tiny_family):
    with pytest.raises(ValueError, match=r"'first_visual' reads .* and 'sample-1' has no image"):
        run(compress(tiny_family), make_batch([(1, 6), (0, 6)]), Compression(FirstVisual(), 0.5))


def test_evicted_entries_go_where_the_method_or_the_user_says():
    elastic = build_eviction("elastic")
    assert Compression().merging == Compression(FirstEntries(), 0.5).merging == "none"
    assert Compression(elastic, 0.5).merging == "position"
    assert Compression(elastic, 0.5, merge="none").merging == "none"
    assert Compression(build_eviction("per_layer(elastic)", shares=(0.5, 0.5)), 0.5).merging == "position"


@pytest.mark.parametrize(
    ("compression", "label"),
    [
        (Compression(), "-"),
        (Compression(key_channels=0.6, key_axes="pca", kv_dtype="int8"), "keys 0.6 pca int8"),
        (Compression(FirstEntries(), 0.1, merge="pivot"), "first 0.1 merge pivot"),
        (Compression(FirstEntries(), 0.1, key_channels=0.5, kv_dtype="int8"), "first 0.1 keys 0.5 int8"),
        (Compression(FirstVisual(), 0.1, scope="all", rerotate=True), "first_visual 0.1 all rerotated"),
        (Compression(FirstVisual(), 4096, "bytes", "all", "int4"), "first_visual 4,096 bytes all int4"),
    ],
)
def test_labels(compression, label):
    assert compression.label == label


def run(backbone, batch, compression):
    cache = PackedCache(backbone.family.shape.num_layers)
    return prefill(backbone, batch, cache, compression).plan, cache


def kept_counts(plan, batch, region=None):
    counts = []
    for layer in plan.layers:
        kept, codes = layer.entries_BN >= 0, batch.regions_BN.gather(1, layer.entries_BN.clamp(min=0))
        counts.append((kept if region is None else kept & (codes == region)).sum(-1).tolist())
    return counts


@pytest.mark.parametrize(
    ("keep", "unit", "expected"), [(0.25, "fraction", [16, 32]), (0.3, "fraction", [19, 38]), (7, "tokens", [7, 7])]
)
def test_visual_budgets_leave_the_text_whole(tiny_family, keep, unit, expected):
    batch = make_batch([(1, 6), (2, 9)])
    plan, _ = run(compress(tiny_family), batch, Compression(FirstVisual(), keep, unit))
    assert kept_counts(plan, batch, Region.VISUAL) == [expected] * 4
    text = [count - visual for count, visual in zip([8 + 64, 11 + 128], [64, 128], strict=True)]
    assert kept_counts(plan, batch) == [[a + b for a, b in zip(expected, text, strict=True)]] * 4


def test_budgets_over_everything_count_what_the_reducer_left(tiny_family):
    batch = make_batch([(1, 6)])
    backbone = compress(tiny_family, name="fastv", keep_ratio=0.25)
    plan, _ = run(backbone, batch, Compression(FirstEntries(), 0.5, scope="all"))
    assert kept_counts(plan, batch) == [[(16 + 8) // 2]] * 4
    plan, _ = run(backbone, batch, Compression(FirstEntries(), 900, "tokens", "all"))
    assert kept_counts(plan, batch) == [[24]] * 4


@sampled("scope", [None, "all"], every=2)
@sampled("name", FREEING, every=4)
def test_only_the_context_competes_unless_all_is_asked_for(tiny_family, name, scope):
    batch = make_batch([(1, 9), (2, 12)], pad_left=True)
    method = build_eviction(name, **settings_for(name, tiny_family))
    plan, _ = run(compress(tiny_family), batch, Compression(method, 0.25, scope=scope))
    total, visual = (sum(map(sum, kept_counts(plan, batch, region))) for region in (None, Region.VISUAL))
    if scope == "all":
        assert total <= 4 * ((11 + 64) // 4 + (14 + 128) // 4) * (4 if name in PER_HEAD else 1)
    else:
        assert total - visual == 4 * (11 + 14)
        assert 4 * (16 + 32) <= visual <= 4 * (16 + 32) * (4 if name in PER_HEAD else 1)


@sampled("scope", ["context", "all"], every=2)
@sampled("name", [name for name in FREEING if not EVICTIONS[name].needs_question], every=4)
def test_the_last_row_of_a_prompt_stays_inside_the_budget(tiny_family, name, scope):
    batch = make_batch([(1, 6), (1, 6)])
    batch.regions_BN[0, -4:] = int(Region.PADDING)  # the last visual token is at 65
    batch.regions_BN[0, 66:] = int(Region.PADDING)
    method = build_eviction(name, **settings_for(name, tiny_family))
    plan, _ = run(compress(tiny_family), batch, Compression(method, 0.125, scope=scope))
    for layer in plan.layers:
        last = (layer.entries_BN[0] == 65).nonzero()[:, 0]
        assert len(last) == 1
        assert layer.heads_BNh is None or layer.heads_BNh[0, last[0]].all()
    if scope == "context" and name not in PER_HEAD:
        assert sum(x[0] for x in kept_counts(plan, batch, Region.VISUAL)) == 4 * 8


@pytest.mark.parametrize(
    ("tokens", "context", "expected"),
    [(18, None, 18), (301, None, 301 - 237 + 59), (301, 1, 301), (301, 300, 1 + 75), (301, 200, 101 + 50)],
)
def test_questions_stay_and_short_prompts_are_whole(tokens, context, expected):
    """A fourth of the context stays, whatever the prompt; at least one entry where there is a context."""
    family = text_family()
    ids = torch.randint(10, 60, (1, tokens), generator=torch.Generator().manual_seed(0))
    batch = batch_from_inputs(family, ids, torch.ones_like(ids).bool(), {}, context)
    plan, _ = run(compress(family), batch, Compression(build_eviction("streaming_llm"), 0.25))
    assert kept_counts(plan, batch) == [[expected]] * family.shape.num_layers


def test_a_budget_that_cannot_hold_the_text_says_which_could(tiny_family):
    batch, backbone = make_batch([(1, 9)]), compress(tiny_family)
    needed = 4 * (11 + 1) * 2 * tiny_family.shape.side_bytes
    for budget in (5_000, needed - 1):
        with pytest.raises(ValueError, match=rf"the entries that always stay .*; it needs at least {needed} bytes$"):
            run(backbone, batch, Compression(FirstVisual(), budget, "bytes"))
    plan, _ = run(backbone, batch, Compression(FirstVisual(), needed, "bytes"))
    assert kept_counts(plan, batch, Region.VISUAL) == [[1]] * 4
    family, batch = text_family(), text_batch([(0, 20, 0)])  # nothing to compress, which is counted all the same
    whole = family.shape.num_layers * 21 * 2 * family.shape.side_bytes
    run(compress(family), batch, Compression(FirstEntries(), whole, "bytes"))
    refuses(f"at least {whole} bytes", run, compress(family), batch, Compression(FirstEntries(), whole - 1, "bytes"))


SETTINGS = {"snapkv": {"rows": "mean", "window": 3, "kernel": 3}, "expected_attention": {"sinks": 1, "future": 8}}
VALUES = {"random": 0.6, "keydiff": -0.2, "kvzip": -2.4, "tova": -3.0, "snapkv": -3.1, "expected_attention": -2.9}
"""Methods with absolute scores, and what leaves some of the tiny models' entries in most heads."""
WINDOW = 3


def compression_of(name: str, **changed) -> Compression:
    method = build_eviction(name, **SETTINGS.get(name, {}))
    return Compression(method, **{"threshold": Threshold(VALUES[name], WINDOW), **changed})


def cell_of(**levels: str) -> dict[str, str]:
    return {**PLAIN_CELL, "batch": "three_left", "protocol": "query_aware", **levels}


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
    inputs = {"input_ids": batch.input_ids_BN, "attention_mask": batch.regions_BN != Region.PADDING}

    def told(compression):
        model = SubTokenModel.around(backbone, compression)
        model.generate(**inputs, max_new_tokens=2, context_length=20, do_sample=False)
        return model.cache_report()

    report, budget = told(compression_of("keydiff")), told(Compression(build_eviction("keydiff"), 0.5))
    assert len(report.shares) == 3
    mean, deviation = statistics.fmean(report.shares), statistics.stdev(report.shares)
    words = f"measured: a threshold promises none; {mean:.1%} ± {deviation:.1%} of each of 3 prompts"
    assert f"compressed region: {report.kept_entries:.1%} of its entries kept ({words})" in str(report)
    assert min(report.shares) <= report.realised_fraction <= max(report.shares)
    assert (budget.shares, "threshold" in str(budget)) == ([], False)
