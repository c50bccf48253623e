"""A context before its question, and a prefill in chunks: where that changes nothing, nothing changes."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.nn import functional

from subtoken_train.engine import attention
from subtoken_train.evictions import EVICTIONS, build_eviction
from subtoken_train.evictions.thresholds import Threshold
from subtoken_train.inference import layer_packer, prefill
from subtoken_train.inference.batched import generate_batch, score_batch
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import decode
from subtoken_train.routing import RoutingConfig
from subtoken_train.types import Region
from tests.support.helpers import compress, only_sample, opened
from tests.support.refusals import refuses
from tests.support.sampling import sampled
from tests.support.truth_cells import backbone_of
from tests.support.truth_models import KV_HEADS, OwnSets, family_of, prompts

CELL = {"selector": "none", "layout": "contiguous", "groups": "8/3", "budget": "per_token", "precision": "fp32"}
THRESHOLDS = {"random": 0.6, "keydiff": -0.2, "tova": -3.0, "expected_attention": -2.9}


def backbone_for(family, reducer="none", selector="none", **levels):
    return backbone_of({**CELL, "family": family, "reducer": reducer, "selector": selector, **levels})


@sampled("kind", ["three_left", "three_right", "text_left", "text_right"], every=8)
@sampled("family", ["llava", "llava_gqa", "qwen2_5_vl", "llama"], every=3)
def test_without_compression_the_protocols_are_one(family, kind):
    backbone, (kind, _, side) = backbone_for(family), kind.partition("_")
    batch = prompts(backbone.family, kind, side == "left")
    runs = [opened(backbone, batch, protocol=protocol) for protocol in ("query_aware", "context_first")]
    assert (runs[0][0].logits_BV - runs[1][0].logits_BV).abs().max() < 1e-4
    assert torch.equal(runs[0][1].next_position, runs[1][1].next_position)
    further = torch.randint(10, 60, (3, 5), generator=torch.Generator().manual_seed(1))
    for start, stop in ((0, 1), (1, 5)):  # one token, then several
        whole, first = (decode(backbone, further[:, start:stop], cache) for _, cache in runs)
        assert (whole - first).abs().max() < 1e-4
    answers = [generate_batch(backbone, batch, max_new_tokens=10, protocol=p) for p in ("query_aware", "context_first")]
    assert [x.token_ids for x in answers[0]] == [x.token_ids for x in answers[1]]


def test_the_last_context_token_ranks():
    backbone = compress(family_of("llava"), RoutingConfig(num_groups=8, kept_groups=2), name="fastv", keep_ratio=0.25)
    batch, other = (prompts(backbone.family, "three", pad_left=True) for _ in range(2))
    asks = batch.regions_BN == Region.QUERY
    other.input_ids_BN[asks] = other.input_ids_BN[asks] % 40 + 11

    def kept(protocol):
        both = [opened(backbone, each, protocol=protocol)[0] for each in (batch, other)]
        return [each.plan.layers[-1].entries_BN.tolist() for each in both]

    first, aware = kept("context_first"), kept("query_aware")
    assert first[0] == first[1] != aware[0] != aware[1]


def test_prompts_without_context_are_not_compressed():
    backbone = backbone_for("llava_gqa", "fastv_embeds", "linear")
    batch = prompts(backbone.family, "text", pad_left=True)
    compression = Compression(build_eviction("h2o"), 0.25)
    got = generate_batch(backbone, batch, max_new_tokens=5, compression=compression, protocol="context_first")
    plain = generate_batch(backbone_for("llava_gqa"), only_sample(batch, 1), max_new_tokens=5)
    assert got[1].token_ids == plain[0].token_ids
    assert got[1].entries_before == got[1].region_bytes == 0
    assert got[1].dense_kv_bytes <= got[1].kv_bytes <= got[1].dense_kv_bytes + 8 * 2 * backbone.family.shape.num_layers
    assert got[0].kv_bytes < 0.5 * got[0].dense_kv_bytes


@pytest.mark.parametrize("eviction", [None, OwnSets()])
def test_chosen_samples_keep_their_padding(eviction):
    """Questions of unequal length are padded in the tail; samples can be reordered and repeated all the same."""
    backbone, rows = backbone_for("llava_gqa"), torch.tensor([2, 0, 2])
    KV_HEADS[0] = backbone.family.shape.num_kv_heads
    batch, further = prompts(backbone.family, "three", pad_left=True), torch.tensor([[11, 12], [13, 14], [15, 16]])
    whole, chosen = (opened(backbone, batch, Compression(eviction), "context_first")[1] for _ in range(2))
    expected = decode(backbone, further, whole)[rows]
    chosen.batch_select_indices(rows)
    for _ in range(2):
        assert (decode(backbone, further[rows], chosen) - expected).abs().max() < 1e-4
        chosen.crop(-2)


REFUSED = {
    "reducer": ("llama", "quest", "none", None, "reducer 'quest' chooses by the question; use query_aware"),
    "pruner": ("llava", "cdpruner", "none", None, "reducer 'cdpruner' chooses by the question; use query_aware"),
    "routers": ("llama", "none", "query", None, "the routers are conditioned on the question"),
    "image": ("llava", "none", "none", "aircache", "'aircache' reads the attention from the question to the image"),
    "no question": ("llava", "none", "none", None, "nothing follows the context of 'sample-1'"),
    "protocol": ("llava", "none", "none", None, "unknown protocol 'protocol'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_go_first_is_refused(name):
    family, reducer, selector, eviction, words = REFUSED[name]
    backbone = backbone_for(family, reducer, selector)
    batch, protocol = prompts(backbone.family, "three", pad_left=True), "context_first"
    if name == "no question":
        batch.regions_BN[1, -1] = int(Region.VISUAL)
    compression = Compression() if eviction is None else Compression(build_eviction(eviction), 0.5)
    how = {"compression": compression, "protocol": name if name == "protocol" else protocol}
    refuses(words, score_batch, backbone, batch, [[[1]]] * 3, **how)


PLAIN_LEVELS = {"selector": "none", "layout": "contiguous", "groups": "8/3", "budget": "per_token", "precision": "fp32"}
OWN_BUDGETS = {"budgets": "uniform"}
SETTINGS = {
    "snapkv": {"window": 4},
    "rkv": {"window": 2},
    "aircache": OWN_BUDGETS,
    "vl_cache": OWN_BUDGETS,
    "tgv_kv": OWN_BUDGETS,
}
METHODS = {name: build_eviction(name, **SETTINGS.get(name, {})) for name in (*EVICTIONS, "ada(h2o)", "critical(tova)")}
del METHODS["triattention"]  # whose numbers are those of one backbone
BY_LAYER = [name for name, method in METHODS.items() if not (method.across_layers or "second_pass" in method.needs)]


def compressed_by(backbone, batch, compression, protocol="query_aware", steps=3):
    """The plan's layers, and the logits of the next token and of some more that are the same in all runs."""
    first, cache = opened(backbone, batch, compression, protocol)
    tokens = torch.randint(10, 60, (steps, len(batch.input_ids_BN), 1), generator=torch.Generator().manual_seed(5))
    return first.plan, torch.stack([first.logits_BV, *(decode(backbone, ids, cache) for ids in tokens)])


def same(one, other):
    return one is other is None or torch.equal(one, other)


def check(cell, batch, method=None, chunks=(7,), protocol="query_aware", scope="context", **further):
    backbone = backbone_of({**PLAIN_LEVELS, **cell})
    kind, side = batch.split("_")
    batch = prompts(backbone.family, kind, side == "left")
    compression = Compression(method, 0.4 if method and "threshold" not in further else 1.0, scope=scope, **further)
    plan, logits = compressed_by(backbone, batch, compression, protocol)
    for chunk in chunks:
        found, near = compressed_by(backbone, batch, replace(compression, prefill_chunk=chunk), protocol)
        assert found.layout == plan.layout
        for ours, its in zip(found.layers, plan.layers, strict=True):
            for name in ("entries_BN", "group_mask_BNS", "heads_BNh", "rows_BN"):
                assert same(getattr(ours, name), getattr(its, name)), name
            if its.cut_keys is not None:
                assert torch.equal(ours.cut_keys.channels_Bhd, its.cut_keys.channels_Bhd)
        assert (near - logits).abs().max() < 5e-5


PAIRS = [
    (name, family) for name in BY_LAYER for family in ("llama", "llava_gqa")
    if family != "llama" or not METHODS[name].needs_image
]  # fmt: skip


@sampled(("name", "family"), PAIRS, every=5)
def test_every_method_keeps_the_same(name, family):
    """Batch of three, grouped heads, an uneven last chunk, one row at a time, and more rows than there are."""
    method = METHODS[name]
    for side, scope in product(("left", "right"), ("context", "all")):
        check({"family": family, "reducer": "none"}, f"three_{side}", method, (7, 16, 500), scope=scope)


@sampled("side", ["left", "right"], every=10)
@sampled(
    ("family", "reducer", "selector", "budget", "method"),
    [
        ("llama", "none", "none", "per_token", None), ("llama", "none", "linear", "per_token", "snapkv"),
        ("llama", "quest", "gated", "per_token", None), ("mistral_window", "quest", "linear", "global", "snapkv"),
        ("llava_window", "fastv_decoder", "gated", "per_token", "snapkv"),
        ("llava_gqa", "fastv_embeds", "linear", "ranked", "h2o"),
        ("llava_gqa", "fastv_decoder", "gated", "per_token", "snapkv"),
        ("llava", "visionzip", "value_norm", "per_token", "knorm"),
        ("qwen2_5_vl", "fastv_decoder", "none", "per_token", "h2o"), ("qwen2_5_vl", "visionzip", "mlp", "global", None),
    ],
    every=4,
)  # fmt: skip
def test_routers_and_reducers_choose_the_same(monkeypatch, family, reducer, selector, budget, method, side):
    monkeypatch.setattr(attention, "ROW_BLOCK", 5)
    cell = {"family": family, "reducer": reducer, "selector": selector, "budget": budget}
    for kind in ("three", *(["text"] if "ll" in family or family == "qwen2" else [])):
        check(cell, f"{kind}_{side}", None if method is None else METHODS[method], (7, 13))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("family", "selector"), [("llama", "linear"), ("llava_gqa", "gated"), ("qwen2", "none")])
def test_a_context_before_its_question(family, selector, side):
    cell = {"family": family, "reducer": "none", "selector": selector}
    check(cell, f"three_{side}", METHODS["h2o"], (5, 16), "context_first")


@pytest.mark.parametrize("name", THRESHOLDS)
def test_a_threshold_leaves_the_same(name):
    settings = {"expected_attention": {"sinks": 1, "future": 8}}.get(name, {})
    cell = {"family": "llama", "reducer": "none"}
    check(cell, "three_left", build_eviction(name, **settings), (5,), threshold=Threshold(THRESHOLDS[name], 3))


@pytest.mark.parametrize("kv_dtype", ["int8", "kivi4"])
def test_key_channels_and_integers(kv_dtype):
    cell = {"family": "llama", "reducer": "quest", "selector": "linear"}
    check(cell, "three_left", METHODS["h2o"], (7, 13), key_channels=0.5, kv_dtype=kv_dtype)


@pytest.mark.parametrize("scope", ["context", "all"])
def test_key_channels_along_principal_axes(scope):
    """The same basis, but for numbers that fall on two sides of a half: mirrors are stored in fp16."""
    backbone = backbone_of({**PLAIN_LEVELS, "family": "llama", "reducer": "none", "selector": "linear"})
    batch = prompts(backbone.family, "three", True)
    compression = Compression(scope=scope, key_channels=0.5, key_axes="pca", key_window=4)
    plan, logits = compressed_by(backbone, batch, compression)
    found, near = compressed_by(backbone, batch, replace(compression, prefill_chunk=7))
    for ours, its in zip(found.layers, plan.layers, strict=True):
        assert torch.equal(ours.cut_keys.entries_BN, its.cut_keys.entries_BN)
        for name, part in vars(its.cut_keys.turn).items():
            assert torch.allclose(getattr(ours.cut_keys.turn, name).float(), part.float(), atol=2e-3), name
    assert (near - logits).abs().max() < 2e-3


@pytest.mark.parametrize(("family", "reducer", "selector"), [("llama", "quest", "linear"), ("llava", "none", "none")])
def test_what_exists_at_a_time(monkeypatch, family, reducer, selector):
    """Rows of a chunk in every wide part, masks of a block, and dense keys and values of one layer."""
    backbone = backbone_of({**PLAIN_LEVELS, "family": family, "reducer": reducer, "selector": selector})
    batch, layers = prompts(backbone.family, "three", pad_left=False), backbone.family.decoder.layers
    wide, masks, dense, packers = [], [], [], []
    attend, packer = functional.scaled_dot_product_attention, layer_packer.LayerPacker

    def attention_of(query, key, value, *mask, **options):
        masks.extend((query.shape[2], each.shape[-2]) for each in mask)  # the vision tower has none
        return attend(query, key, value, *mask, **options)

    def states_at(*_):
        dense.append(sum(states.keys is not None for states in packers[-1].dense.layers))

    monkeypatch.setattr(functional, "scaled_dot_product_attention", attention_of)
    monkeypatch.setattr(attention, "ROW_BLOCK", 3)
    monkeypatch.setattr(prefill, "LayerPacker", lambda *args: packers.append(packer(*args)) or packers[-1])
    handles = [each.mlp.register_forward_pre_hook(lambda _, args: wide.append(args[0].shape[1])) for each in layers]
    handles += [layer.register_forward_hook(states_at) for layer in layers]
    try:
        compressed_by(backbone, batch, Compression(METHODS["knorm"], 0.4, prefill_chunk=7), steps=0)
    finally:
        for handle in handles:
            handle.remove()
    assert sum(wide) == batch.input_ids_BN.shape[1] * len(layers)
    assert (max(wide), max(masks), max(dense)) == (7, (3, 3), 1)


def test_a_question_in_chunks_is_never_evicted():
    """It is part of the prompt, however many tokens and chunks it has between two evictions."""
    backbone = backbone_of({**PLAIN_LEVELS, "family": "llama", "reducer": "none"})
    batch = prompts(backbone.family, "three", True)
    compression = Compression(build_eviction("streaming_llm"), 10, "tokens", every=4)
    _, logits = compressed_by(backbone, batch, compression, "context_first", steps=9)
    _, near = compressed_by(backbone, batch, replace(compression, prefill_chunk=4), "context_first", steps=9)
    assert (near - logits).abs().max() < 5e-5
