"""Windows are refused wherever they stand, before a weight is read."""

from __future__ import annotations

import json

import pytest
from transformers import LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, MistralConfig, Qwen2Config

from checkpoints.tiny_llava import build_model
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.backbone_files import check_full_attention
from subtoken_train.families.llava import LlavaFamily
from subtoken_train.families.load import layout_family, load_family

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 90}
FULL = ["full_attention"] * 2


def vlm(text) -> LlavaConfig:
    """The tiny LLaVA around another text model."""
    return LlavaConfig(vision_config=build_model().config.vision_config, text_config=text, image_token_index=4)


REFUSED = {
    "mistral": (MistralConfig(**SIZES, sliding_window=8), r"mistral with sliding-window attention \(window 8\)"),
    "mistral, kinds": (MistralConfig(**SIZES, sliding_window=8, layer_types=FULL), r"mistral .*\(window 8\)"),
    "qwen2": (
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1),
        r"qwen2 with sliding-window attention \(window 8\)",
    ),
    "chunks": (LlamaConfig(**SIZES, attention_chunk_size=8), "llama with layers of chunked_attention is not supported"),
    "linear": (
        LlamaConfig(**SIZES, layer_types=["full_attention", "linear_attention"]),
        "llama with layers of linear_attention is not supported",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("wrap", [lambda text: text, vlm], ids=["text", "vlm"])
def test_windows_are_refused(name, wrap):
    text, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        check_full_attention(wrap(text))


@pytest.mark.parametrize(
    "text",
    [
        MistralConfig(**SIZES, sliding_window=None),
        Qwen2Config(**SIZES, sliding_window=8),
        LlamaConfig(**SIZES, layer_types=FULL),
    ],
)
def test_full_attention_passes(text):
    check_full_attention(text)
    check_full_attention(vlm(text))


def test_a_vlm_with_a_window_is_refused_before_its_weights(tmp_path):
    config = vlm(REFUSED["mistral"][0])
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    for load in (load_family, layout_family):  # there are no weights
        with pytest.raises(ValueError, match="mistral with sliding-window attention"):
            load(BackboneConfig(path=str(tmp_path)))
    with pytest.raises(ValueError, match="mistral with sliding-window attention"):
        LlavaFamily(LlavaForConditionalGeneration(config), None)
