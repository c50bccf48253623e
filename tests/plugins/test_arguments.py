import pytest
import torch

from subtoken_train.plugins.harness import ModelArguments, read_arguments


def test_values_that_a_parser_made_numbers_of_are_read():
    got = read_arguments(
        {"backbone": "x", "eviction": "snapkv", "eviction_keep": 0.1, "batch_size": 8, "context": 32, "revision": None}
    )
    assert got == ModelArguments(backbone="x", eviction="snapkv", eviction_keep="0.1", batch_size="8", context="32")
    assert got.prompts_together == 8
    assert got.query_tokens == 32
    assert got.settings == {
        "backbone": "x", "eviction": "snapkv", "eviction_keep": "0.1", "batch_size": "8", "context": "32",
    }  # fmt: skip
    assert read_arguments({"backbone": "x"}).query_tokens is None
    given = {"backbone": "x", "eviction": "snapkv", "eviction_keep": "0.1", "prefill_chunk": 4096, "rerotate": "True"}
    got = read_arguments(given).compression()
    assert (got.prefill_chunk, got.rerotate) == (4096, True)
    options = {"eviction": "snapkv", "eviction_keep": "0.1", "eviction_options": "window=4;kernel=3"}
    assert read_arguments({"backbone": "x", **options}).settings == {"backbone": "x", **options}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"adaptor": "x"}, "unknown model argument 'adaptor'. Did you mean 'adapter'"),
        ({}, "give adapter=DIR, or backbone=PATH"),
        ({"backbone": "x", "reducer": "fastv"}, "reducer and keep_ratio go together"),
        ({"backbone": "x", "keep_ratio": 0.5}, "reducer and keep_ratio go together"),
        ({"backbone": "x", "reducer": "fastv", "keep_ratio": "half"}, "keep_ratio=half must be a number"),
        (
            {"backbone": "x", "eviction_keep": 0.1},
            "eviction_keep, eviction_every, eviction_options and scope need eviction=NAME",
        ),
        (
            {"backbone": "x", "scope": "all"},
            "eviction_keep, eviction_every, eviction_options and scope need eviction=NAME",
        ),
        ({"backbone": "x", "eviction": "snapkv"}, "eviction=snapkv needs eviction_keep"),
        ({"backbone": "x", "selector": "random"}, "unknown model argument 'selector'"),
        ({"backbone": "x", "eviction": "snapkv", "eviction_options": "window"}, "'window' of snapkv must be written"),
        ({"backbone": "x", "protocol": "context_frist"}, "Did you mean 'context_first'"),
        ({"backbone": "x", "prefill_chunk": "0"}, "prefill_chunk=0 must be a whole number of at least 1: rows of a"),
        ({"backbone": "x", "rerotate": "maybe"}, "unknown value of rerotate 'maybe'"),
        ({"backbone": "x", "context": "few"}, "context=few must be a whole number"),
        ({"backbone": "x", "batch_size": "auto"}, "batch_size=auto must be a whole number"),
        ({"backbone": "x", "batch_size": 0}, "batch_size=0 must be a whole number of at least 1"),
    ],
)
def test_wrong_arguments_are_worded(given, message):
    with pytest.raises(ValueError, match=message):
        read_arguments(given)


def test_an_empty_budget_is_none():
    with pytest.raises(ValueError, match="'' is no budget"):
        read_arguments({"backbone": "x", "eviction": "snapkv", "eviction_keep": ""}).model()


def test_a_harness_may_have_no_use_for_a_name():
    with pytest.raises(ValueError, match="unknown model argument 'context'"):
        read_arguments({"backbone": "x", "context": 3}, unavailable=("context",))


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="each of which would answer everything"):
        read_arguments({"backbone": "x"})


def test_a_backbone_alone_loads_with_reducer_eviction_and_dtype(vlm_adapter):
    model = read_arguments(
        {
            "backbone": str(vlm_adapter.parent / "backbone"), "dtype": "bfloat16", "device": "cpu", "kv_dtype": "int8",
            "reducer": "fastv", "keep_ratio": 0.5, "eviction": "snapkv", "eviction_keep": "20tokens",
            "eviction_options": "window=4;kernel=3",
        }
    ).model()  # fmt: skip
    assert model.backbone.family.model.dtype == torch.bfloat16
    assert (model.backbone.reducer.name, model.backbone.reducer.keep_ratio) == ("fastv", 0.5)
    assert (model.compression.keep, model.compression.unit, model.compression.kv_dtype) == (20, "tokens", "int8")
    assert (model.compression.eviction.window, model.compression.eviction.kernel) == (4, 3)


def test_an_adapter_brings_its_own_reducer_and_may_load_in_another_dtype(vlm_adapter):
    plain = read_arguments({"adapter": str(vlm_adapter), "device": "cpu"}).model()
    assert plain.backbone.reducer.name == "fastv"
    assert plain.backbone.family.model.dtype == torch.float32
    moved = {"adapter": str(vlm_adapter), "backbone": str(vlm_adapter.parent / "backbone"), "dtype": "bfloat16"}
    assert read_arguments({**moved, "device": "cpu"}).model().backbone.family.model.dtype == torch.bfloat16


def test_a_folder_without_an_adapter_is_not_taken_for_a_backbone(vlm_adapter):
    with pytest.raises(ValueError, match="is not an adapter folder"):
        read_arguments({"adapter": str(vlm_adapter.parent / "backbone"), "device": "cpu"}).model()
