"""Budgets, settings and value groups as they are written: on a command line, in a grid or by keyword."""

import pytest
import torch

from subtoken_train import SubTokenModel
from subtoken_train.cache.cache import PackedCache
from subtoken_train.evaluation.runner.arms import prepare, with_anchors
from subtoken_train.evaluation.runner.spec import expand_arms
from subtoken_train.evictions import build_eviction
from subtoken_train.inference.compression import Compression, compression_of, method_record, parse_keep, parse_settings
from subtoken_train.inference.pool import ModelPool
from subtoken_train.inference.prefill import open_prompts
from subtoken_train.kernels.storage import RoutedValues
from subtoken_train.ledger.ledger import nominal_ledger
from subtoken_train.ledger.measure import measured_ledger
from subtoken_train.routing import RoutingConfig, untrained_routing
from tests.support.helpers import compress, save_backbone
from tests.support.refusals import refuses
from tests.support.text_families import text_batch, text_family

BUDGETS = {
    "0.1": (0.1, "fraction"),
    "-2": (-2.0, "fraction"),
    " 256 tokens ": (256, "tokens"),
    "64 Tokens": (64, "tokens"),
    "4096B": (4096, "bytes"),
    "0.3mb": (300_000, "bytes"),
    "1.5GB": (1_500_000_000, "bytes"),
}


@pytest.mark.parametrize("text", BUDGETS)
def test_budgets(text):
    assert parse_keep(text) == BUDGETS[text]
    if (keep := BUDGETS[text])[0] > 0:
        made = compression_of({"eviction": "snapkv", "eviction_keep": text})
        assert (made.keep, made.unit) == keep


def test_settings_take_the_kind_of_their_defaults(dummy_evictions):
    read = parse_settings("first", ["window=3", "weight=2", "loud=true", "mode=1", "stranger=x=y"])
    assert read == {"window": 3, "weight": 2.0, "loud": True, "mode": "1", "stranger": "x=y"}
    assert isinstance(read["weight"], float)


def test_settings_of_a_chain(dummy_evictions):
    read = parse_settings("per_layer(ada(first))", ["window=3", "ada.alpha=1", "shares=4:3:2.5", "first.weight=2"])
    assert read == {"window": 3, "ada.alpha": 1.0, "shares": (4.0, 3.0, 2.5), "first.weight": 2.0}
    refuses(r"shares.*must be a", parse_settings, "per_layer(first)", ["shares=4:b"])
    assert parse_settings("h2o", ["window=3"]) == {"window": 3}
    refuses(r"unknown eviction method 'frst'\. Did you mean 'first'", parse_settings, "ada(frst)", ["alpha=1"])


WRONG = {
    "window": "'window' of first must be written key=value",
    "=3": "must be written key=value",
    "window=3;window=4": "'window' of first is given twice",
    "window=3.5": "first window is 3.5; it must be a whole number",
    "weight=much": "first weight is 'much'; it must be a number",
    "loud=often": "first loud is 'often'; it must be true or false",
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_settings(dummy_evictions, text):
    refuses(WRONG[text], lambda: parse_settings("first", text.split(";")))


def test_records_name_settings_of_earlier_versions_as_these_wrote_them():
    """Files of theirs are compared by them: caches, and thresholds of a method."""
    left = [("kvzip", "level", "token"), ("kvgrad", "level", "token"), ("finch", "normalise", True)]
    for name, setting, value in [*left, ("compactor", "scaled", False)]:
        assert method_record(build_eviction(name))[setting] == value


@pytest.mark.parametrize("method", ["snapkv", "pyramidkv", "h2o"])
def test_a_window_is_a_number_or_a_share(method):
    for text, value in (("64", 64), ("0.1", 0.1)):
        (read,) = parse_settings(method, [f"window={text}"]).values()
        assert (read, type(read)) == (value, type(value))
        assert build_eviction(method, window=read).window == value
    refuses(f"{method} window is 'half'; it must be a number", parse_settings, method, ["window=half"])


NO_BUDGETS = dict.fromkeys(
    ("", "10%", "0,1", "MB", "inf", "1 2", "x" * 5000), r"is not a budget; write a fraction .0.1., tok"
)
NO_BUDGETS |= {
    "20MBs": "unknown unit of a budget .*Did you mean 'MB'",
    "64": r"eviction_keep=64.0 must lie in \(0, 1\]",
    "0.5tokens": "eviction_keep=0.5 tokens must be a whole number",
}


@pytest.mark.parametrize("text", NO_BUDGETS, ids=lambda text: text[:9])
def test_what_is_no_budget_is_refused_in_words(text):
    assert len(refuses(NO_BUDGETS[text], compression_of, {"eviction": "snapkv", "eviction_keep": text})) < 400
    refuses("unknown setting 'eviction_unit'", compression_of, {"eviction_unit": "tokens"})


TEXT, QUESTIONS = "the bee and the spider met in the garden . " * 6, ["is there a 7 ?", "describe ."]
COMPRESSION = {"eviction": "h2o", "eviction_keep": 0.5, "kv_dtype": "int8", "prefill_chunk": 16}


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    return save_backbone(text_family("llama", max_position_embeddings=512), tmp_path_factory.mktemp("llama") / "whole")


def test_they_are_the_router_free_arm_and_leave_the_model_as_it_was(backbone, tmp_path):
    family = text_family("llama", max_position_embeddings=512)
    groups = {"groups": (8, 3), "layout": "per_head"}
    model = SubTokenModel(family.model, family.tokenizer, **groups, selector="output_norm", **COMPRESSION)
    answers = model.ask(TEXT, QUESTIONS, max_new_tokens=4)
    assert model.cache_report().nominal_fraction == (1 + 3 / 8) / 2
    assert not any(part._forward_hooks for part in family.model.modules())
    file = model.cache.save(tmp_path / "context.safetensors")
    routing = RoutingConfig("output_norm", 8, 3, "per_head")
    arm = SubTokenModel.around(compress(text_family("llama"), routing), compression_of(COMPRESSION))
    assert arm.ask(TEXT, QUESTIONS, max_new_tokens=4) == answers
    loaded = SubTokenModel.from_pretrained(backbone, **groups, selector="output_norm", **COMPRESSION)
    loaded.load_cache(file)
    assert loaded.ask(None, QUESTIONS, max_new_tokens=4) == answers
    with pytest.raises(ValueError, match="the cache was made with adapter"):
        SubTokenModel.from_pretrained(backbone, groups="8,3", **COMPRESSION).load_cache(file)


@pytest.mark.parametrize("layout", ["contiguous", "per_head"])
@pytest.mark.parametrize(("selector", "named"), [("leading", False), ("static", False), ("value_norm", True)])
def test_groups_that_all_tokens_keep_have_no_index(selector, named, layout):
    """Neither the cache, whose offsets say them, nor the ledgers hold one; heads here keep entries of their own."""
    backbone = compress(text_family("llama"), RoutingConfig(selector, 8, 4, layout)).eval()
    prompts, cache = text_batch([(37, 5, 0), (24, 6, 0)], True), PackedCache(backbone.family.shape.num_layers)
    compression = Compression(build_eviction("h2o"), 0.5, kv_dtype="int4_rotated")
    with torch.no_grad():
        plan = open_prompts(backbone, prompts, cache, compression, "context_first").plan
    parts = [part.values for layer in cache.layers for block in layer.blocks for part in block.parts]
    routed = [values for values in parts if isinstance(values, RoutedValues) and values.entries]
    assert routed
    assert [values.index is not None for values in routed] == [named] * len(routed)
    shape = backbone.family.shape
    measured = measured_ledger(plan, prompts.regions_BN, shape)
    for ledger in (measured, nominal_ledger(shape, {"context": 61}, backbone.group_budget)):
        assert any(entry.index_bytes for entry in ledger.entries) == named


def test_a_grid_names_them_and_their_anchors(backbone):
    quest = {"backbone": str(backbone), "reducer": "quest", "keep_ratio": 0.5}
    specs = expand_arms({**quest, "selector": "random", "seed": 3, "groups": ["8,4", "8,2"], "layout": "per_head"})
    pool = ModelPool()
    arms, notes = with_anchors(prepare(specs, pool), pool)
    assert not notes
    assert [it.facts.name for it in arms[:2]] == [f"whole-quest0.5-S8K{kept}-random-per_head-seed3" for kept in (4, 2)]
    assert [arm.facts.groups for arm in arms] == ["S8K4 random", "S8K2 random", "-", "-"]
    assert [arm.facts.nominal_kv for arm in arms[:2]] == [0.375, 0.3125]
    assert [arm.facts.anchor for arm in arms[:2]] == [arm.facts.name for arm in arms[2:]]
    assert [arm.reducer.keep_ratio for arm in arms[2:]] == [0.375, 0.3125]
    assert pool.loads == 1


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (("8,2", "linear"), "selector 'linear' is a trained router: give an adapter"),
        (("8,2", "norm"), "unknown selector without training 'norm'.*Allowed: .*value_norm"),
        ((16,), "groups 16 must be two whole numbers, S and K, for instance 16,12"),
        (("8,2,1",), "must be two whole numbers"),
        (((8, 2.5),), "must be two whole numbers"),
        ((None, "value_norm"), "selector 'value_norm' of a backbone alone needs groups"),
        ((None, None, "per_head"), "layout 'per_head' of a backbone alone needs groups"),
    ],
)
def test_what_is_no_choice_without_training_is_refused(asked, words):
    refuses(words, lambda: untrained_routing(*asked))
    assert untrained_routing("8,2") == untrained_routing([8, 2]) == RoutingConfig("value_norm", 8, 2)
