"""How layers attend: windows are read as transformers reads them, other kinds are refused before a weight is read."""

from __future__ import annotations

import json

import pytest
from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen3Config,
)

from checkpoints.tiny_llava import build_model
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.decoder import layer_windows
from subtoken_train.families.llava import LlavaFamily
from subtoken_train.families.load import layout_family, load_family

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 90}
FULL = ["full_attention"] * 2
HALF = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}


def vlm(text) -> LlavaConfig:
    """The tiny LLaVA around another text model."""
    return LlavaConfig(vision_config=build_model().config.vision_config, text_config=text, image_token_index=4)


REFUSED = {
    "chunks": (LlamaConfig(**SIZES, attention_chunk_size=8), "llama with layers of chunked_attention is not supported"),
    "linear": (
        LlamaConfig(**SIZES, layer_types=["full_attention", "linear_attention"]),
        "llama with layers of linear_attention is not supported: they keep a state instead of keys and values",
    ),
    "no length": (MistralConfig(**SIZES, sliding_window=0), "sliding_window=0 must be a whole number of at least 1"),
}
WINDOWS = [
    (MistralConfig(**SIZES, sliding_window=8), [8, 8]),
    (MistralConfig(**SIZES, sliding_window=8, layer_types=FULL), [8, 8]),
    (MistralConfig(**SIZES, sliding_window=None), [None, None]),
    (Qwen2Config(**SIZES, **HALF), [None, 8]),
    (Qwen2Config(**SIZES, sliding_window=8), [None, None]),
    (Qwen3Config(**SIZES, **HALF), [None, 8]),
    (LlamaConfig(**SIZES, layer_types=FULL), [None, None]),
]


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("wrap", [lambda text: text, vlm], ids=["text", "vlm"])
def test_other_kinds_are_refused(name, wrap):
    text, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        layer_windows(wrap(text))


@pytest.mark.parametrize(("text", "windows"), WINDOWS)
def test_windows_are_read_layer_by_layer(text, windows):
    assert layer_windows(text) == layer_windows(vlm(text)) == windows


def test_beside_images_known_windows_alone_are_served():
    gemma = Gemma3TextConfig(**SIZES, sliding_window=8, layer_types=["sliding_attention", "full_attention"])
    assert layer_windows(gemma) == [8, None]
    with pytest.raises(ValueError, match="with images, they are supported only for mistral, qwen2, qwen3"):
        layer_windows(vlm(gemma))


def test_a_grid_has_no_window():
    text = {**SIZES, **HALF, "num_key_value_heads": 2, "model_type": "qwen2_5_vl_text"}
    with pytest.raises(ValueError, match=r"window 8\) is not supported: places in a grid have no distance"):
        layer_windows(Qwen2_5_VLConfig(text_config=text), mrope=True)


def test_a_vlm_of_unknown_kind_is_refused_before_its_weights(tmp_path):
    config = vlm(REFUSED["chunks"][0])
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    for load in (load_family, layout_family):  # there are no weights
        with pytest.raises(ValueError, match="llama with layers of chunked_attention"):
            load(BackboneConfig(path=str(tmp_path)))
    with pytest.raises(ValueError, match="llama with layers of chunked_attention"):
        LlavaFamily(LlavaForConditionalGeneration(config), None)


@pytest.mark.parametrize("load", [load_family, layout_family])
def test_a_window_runs_on_sdpa_alone(tmp_path, load):
    (tmp_path / "config.json").write_text(json.dumps(vlm(WINDOWS[0][0]).to_dict()))
    with pytest.raises(ValueError, match=r"a sliding window \(8 positions\) runs on attention: sdpa, not on 'eager'"):
        load(BackboneConfig(path=str(tmp_path), attention="eager"))
