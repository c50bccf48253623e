"""Architectures of published backbones, for pre-flight checks without network or weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, Qwen2Config

_LLAVA_TEXT = {
    "llava-hf/llava-1.5-7b-hf": (4096, 11008, 32, 32),
    "llava-hf/llava-1.5-13b-hf": (5120, 13824, 40, 40),
}


_LANGUAGE_MODELS: dict[str, Callable[[], Any]] = {
    "meta-llama/Llama-2-7b-hf": lambda: LlamaConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
    ),
    "Qwen/Qwen2.5-7B": lambda: Qwen2Config(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=131072,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
    ),
}


def offline_config(name: str) -> Any | None:
    """The configuration of a known Hub id; None for any other name."""
    if name in _LANGUAGE_MODELS:
        return _LANGUAGE_MODELS[name]()
    return _llava_config(name) if name in _LLAVA_TEXT else None


def _llava_config(name: str) -> LlavaConfig:
    width, mlp, layers, heads = _LLAVA_TEXT[name]
    text = LlamaConfig(
        vocab_size=32064,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
    )
    vision = CLIPVisionConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        image_size=336,
        patch_size=14,
        projection_dim=768,
    )
    return LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=32000,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )
