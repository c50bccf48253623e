"""The models whose memory tests measure: random, of the real classes, large enough that no part is negligible."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SiglipVisionConfig,
)

from tests.support.places import ROOT

EMBEDDED = "tiny-llava"
_TEXT: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
_GROUPED = {**_TEXT, "num_key_value_heads": 2}


_QWEN_IDS = {"image_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6, "video_token_id": 7}
_WIDE = {**_TEXT, "vocab_size": 32000}


def _llava(text: dict[str, Any]) -> Any:
    vision = CLIPVisionConfig(
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=168,
        patch_size=14,
        projection_dim=64,
    )
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=LlamaConfig(**text), image_token_index=4)
    )


def _llava_next() -> Any:
    vision = CLIPVisionConfig(
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=84,
        patch_size=14,
        projection_dim=64,
    )
    sides = [[84, 168], [168, 84], [168, 168], [252, 84], [84, 252]]
    text = LlamaConfig(**_TEXT)
    return LlavaNextForConditionalGeneration(
        LlavaNextConfig(vision_config=vision, text_config=text, image_token_index=4, image_grid_pinpoints=sides)
    )


def _llava_onevision() -> Any:
    vision = SiglipVisionConfig(
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=84,
        patch_size=14,
        vision_use_head=False,
    )
    sides = [[84 * high, 84 * wide] for high in (1, 2, 3) for wide in (1, 2, 3)]
    return LlavaOnevisionForConditionalGeneration(
        LlavaOnevisionConfig(
            vision_config=vision,
            text_config=Qwen2Config(**_GROUPED),
            image_token_index=4,
            video_token_index=5,
            image_grid_pinpoints=sides,
        )
    )


def _qwen25vl() -> Any:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    vision = {"depth": 2, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "out_hidden_size": 256}
    text = {**_GROUPED, "rope_parameters": rope}
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=text, vision_config={**vision, "fullatt_block_indexes": [1]}, **_QWEN_IDS)
    )


def _qwen2vl() -> Any:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    vision = {"depth": 2, "embed_dim": 128, "num_heads": 4, "hidden_size": 256}
    text = {**_GROUPED, "rope_parameters": rope}
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision, **_QWEN_IDS))


def _qwen3vl() -> Any:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [12, 10, 10]}
    vision = {"depth": 3, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "out_hidden_size": 256}
    vision = {**vision, "deepstack_visual_indexes": [0, 1]}
    text = {**_GROUPED, "rope_parameters": rope, "head_dim": 64}
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **_QWEN_IDS))


SIZES: dict[str, Callable[[], Any]] = {
    "llava": lambda: _llava(_TEXT),
    "qwen2_5_vl": _qwen25vl,
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_TEXT)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_GROUPED)),
    "llava-32k": lambda: _llava(_WIDE),
    "llama-32k": lambda: LlamaForCausalLM(LlamaConfig(**_WIDE)),
}
"""Models of the cases."""
FURTHER: dict[str, Callable[[], Any]] = {
    "llava_next": _llava_next,
    "llava_onevision": _llava_onevision,
    "qwen2_vl": _qwen2vl,
    "qwen3_vl": _qwen3vl,
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_GROUPED, head_dim=64)),
}
"""Models with one case each."""
TEXT_MODELS = ("llama", "qwen2", "llama-32k", "qwen3")


def save_model(name: str, folder: Path) -> None:
    """Write a model's folder: the embedded VLM's own, or a random model's."""
    if name == EMBEDDED:
        shutil.copytree(ROOT / "checkpoints" / EMBEDDED, folder)
        return
    torch.manual_seed(0)
    (SIZES | FURTHER)[name]().save_pretrained(folder)
