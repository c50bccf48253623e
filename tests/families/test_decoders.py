"""Language models that the registry does not name: what is served, by cells of packed = truth, and what is refused."""

from __future__ import annotations

import json
import re

import pytest
import torch
import transformers

from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.load import layout_family, load_family
from subtoken_train.families.proof import check_structure, prove
from tests.support.sampling import sampled
from tests.support.text_families import DECODERS, KINDS, text_family
from tests.support.truth_cells import PLAIN_CELL, difference

ROUTED = PLAIN_CELL | {"selector": "linear", "batch": "three_left", "scope": "context", "protocol": "query_aware"}
CELLS = {
    "routed": {"eviction": "none", "reducer": "quest"},
    "heads": {"eviction": "own_sets", "protocol": "context_first", "batch": "three_right"},
    "expected": {"eviction": "expected_attention", "reducer": "expected_attention"},
    "second pass": {"eviction": "kvzip", "selector": "bilinear"},
    "chunks": {"eviction": "own_sets", "reducer": "compactor", "chunk": 7},
}
"""Settings that read queries, keys before their rotation, values and windows in different ways."""


@sampled("kind", DECODERS, every=2)
@sampled("cell", CELLS, every=3)
def test_decoding_from_a_packed_cache_is_a_full_recompute(kind, cell):
    found = difference(ROUTED | CELLS[cell] | {"family": kind}, 8)
    assert found.fits("fp32"), found


@sampled("dtype", ["float32", "bfloat16"], every=2)
@sampled("kind", KINDS, every=4)
def test_a_served_model_is_proven(kind, dtype):
    family = text_family(kind, initializer_range=0.2)
    family.model.to(getattr(torch, dtype))
    before = {name: tensor.clone() for name, tensor in family.model.state_dict().items()}
    attention, windows = family.decoder.config._attn_implementation, family.windows
    check_structure(family.model)
    prove(family)
    assert (attention, windows) == (family.decoder.config._attn_implementation, family.windows)
    assert not any(layer._forward_pre_hooks for layer in family.decoder.layers)
    assert all(torch.equal(tensor, before[name]) for name, tensor in family.model.state_dict().items())


def no_window(family):
    family.windows = [None] * len(family.windows)


def window_everywhere(family):
    family.windows = [family.windows[0]] * len(family.windows)


def unturned(family):
    family.turns = lambda layer: layer > 1


def with_sinks(family):
    family.decoder.layers[1].self_attn.register_forward_pre_hook(
        lambda _, args, given: (args, {**given, "s_aux": torch.zeros(4)}), with_kwargs=True
    )


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("gemma3", no_window, "the logits of random tokens differ"),
        ("gemma3", window_everywhere, "the logits of random tokens differ"),
        ("smollm3", unturned, "the queries of layer 0 are not those of its projection, its norm and its rotary"),
        ("granite", with_sinks, "layer 1 hands its attention s_aux"),
    ],
)
def test_what_is_computed_otherwise_is_found_and_named(kind, change, words):
    family = text_family(kind, initializer_range=0.2)
    change(family)
    with pytest.raises(ValueError, match=words):
        prove(family)


SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 90}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
REFUSED = {
    "GPT2": "gpt2 (GPT2LMHeadModel) is not supported: its decoder (model.model) has no layers and no norm",
    "GptOss": "in layer 0 heads have sinks",
    "Gemma2": "it caps attention scores (attn_logit_softcapping)",
    "Qwen3_5Text": "qwen3_5_text with layers of linear_attention is not supported: they keep a state instead of keys",
    "Gemma4Text": "its layers have heads of 16 and 512 channels, and a packed cache has heads of one width",
    "DeepseekV3": "in layer 0 self_attn is of",
}


@sampled("name", REFUSED, every=2)
def test_what_is_not_understood_is_refused_before_its_weights(tmp_path, name):
    config = getattr(transformers, f"{name}Config")(**SIZES, **HEADS)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    for load in (layout_family, load_family):  # there are no weights
        with pytest.raises(ValueError, match=re.escape(REFUSED[name])):
            load(BackboneConfig(path=str(tmp_path)))
