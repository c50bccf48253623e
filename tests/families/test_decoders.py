"""Language models: windows, published sizes, what is served by cells of packed = truth, and what is refused."""

import json
import re
from copy import deepcopy

import pytest
import torch
import transformers
from peft import LoraConfig, inject_adapter_in_model
from transformers import LlamaConfig, LlavaConfig, MistralConfig, Qwen2_5_VLConfig, Qwen2Config, Qwen3Config

from checkpoints.tiny_llava import build_model
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.decoder import layer_windows
from subtoken_train.families.load import layout_family, load_family
from subtoken_train.families.proof import check_structure, prove
from tests.support.refusals import refuses
from tests.support.sampling import sampled
from tests.support.text_families import DECODERS, KINDS, text_family
from tests.support.truth_cells import PLAIN_CELL, difference
from tests.support.truth_models import family_of

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


def with_sinks(family):
    family.decoder.layers[1].self_attn.register_forward_pre_hook(
        lambda _, args, given: (args, {**given, "s_aux": torch.zeros(4)}), with_kwargs=True
    )


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("gemma3", lambda own: setattr(own, "windows", [None] * 3), "the logits of random tokens differ"),
        ("gemma3", lambda own: setattr(own, "windows", own.windows[:1] * 3), "the logits of random tokens differ"),
        ("smollm3", lambda own: setattr(own, "turns", lambda layer: layer > 1), "the queries of layer 0 are not those"),
        ("granite", with_sinks, "layer 1 hands its attention s_aux"),
    ],
)
def test_what_is_computed_otherwise_is_found_and_named(kind, change, words):
    family = text_family(kind, initializer_range=0.2)
    change(family)
    refuses(words, prove, family)


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
        refuses(re.escape(REFUSED[name]), load, BackboneConfig(path=str(tmp_path)))


SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 90}
FULL = ["full_attention"] * 2
HALF = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}


def vlm(text) -> LlavaConfig:
    """The tiny LLaVA around another text model."""
    return LlavaConfig(vision_config=build_model().config.vision_config, text_config=text, image_token_index=4)


OTHER_KINDS = {
    "chunks": (LlamaConfig(**SMALL, attention_chunk_size=8), "llama with layers of chunked_attention is not supported"),
    "linear": (
        LlamaConfig(**SMALL, layer_types=["full_attention", "linear_attention"]),
        "llama with layers of linear_attention is not supported: they keep a state instead of keys and values",
    ),
    "no length": (MistralConfig(**SMALL, sliding_window=0), "sliding_window=0 must be a whole number of at least 1"),
}
WINDOWS = [
    (MistralConfig(**SMALL, sliding_window=8), [8, 8]),
    (MistralConfig(**SMALL, sliding_window=8, layer_types=FULL), [8, 8]),
    (MistralConfig(**SMALL, sliding_window=None), [None, None]),
    (Qwen2Config(**SMALL, **HALF), [None, 8]),
    (Qwen2Config(**SMALL, sliding_window=8), [None, None]),
    (Qwen3Config(**SMALL, **HALF), [None, 8]),
    (LlamaConfig(**SMALL, layer_types=FULL), [None, None]),
]


@pytest.mark.parametrize(("text", "words"), OTHER_KINDS.values(), ids=OTHER_KINDS)
def test_other_kinds_are_refused(text, words):
    for config in (text, vlm(text)):
        refuses(words, layer_windows, config)


@pytest.mark.parametrize(("text", "windows"), WINDOWS)
def test_windows_are_read_layer_by_layer(text, windows):
    assert layer_windows(text) == layer_windows(vlm(text)) == windows


def test_beside_images_known_windows_alone_are_served():
    gemma = transformers.Gemma3TextConfig(
        **SMALL, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    )
    assert layer_windows(gemma) == [8, None]
    refuses("with images, they are supported only for mistral, qwen2, qwen3", lambda: layer_windows(vlm(gemma)))


def test_a_grid_has_no_window():
    text = {**SMALL, **HALF, "num_key_value_heads": 2, "model_type": "qwen2_5_vl_text"}
    with pytest.raises(ValueError, match=r"window 8\) is not supported: places in a grid have no distance"):
        layer_windows(Qwen2_5_VLConfig(text_config=text), mrope=True)


@pytest.mark.parametrize("load", [load_family, layout_family])
def test_a_window_runs_on_sdpa_alone(tmp_path, load):
    (tmp_path / "config.json").write_text(json.dumps(vlm(WINDOWS[0][0]).to_dict()))
    with pytest.raises(ValueError, match=r"a sliding window \(8 positions\) runs on attention: sdpa, not on 'eager'"):
        load(BackboneConfig(path=str(tmp_path), attention="eager"))


def test_the_output_projection_with_its_lora():
    family = deepcopy(family_of("llama"))
    projection = family.decoder.layers[1].self_attn.o_proj
    assert torch.equal(family.output_weight(1), projection.weight)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False), family.model)
    wrapped = family.decoder.layers[1].self_attn.o_proj
    inputs = torch.randn(3, projection.in_features)
    with torch.no_grad():
        assert torch.allclose(inputs @ family.output_weight(1).T, wrapped(inputs), atol=1e-5)


def test_an_unreadable_output_projection_is_a_mistake():
    family = deepcopy(family_of("qwen2"))
    projection = family.decoder.layers[0].self_attn.o_proj
    projection.weight = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.uint8), requires_grad=False)
    refuses("o_proj is quantised", family.output_weight, 0)
