"""Architectures of published backbones, for pre-flight checks without network or weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, Qwen2_5_VLConfig, Qwen2Config

_LLAVA_TEXT = {
    "llava-hf/llava-1.5-7b-hf": (4096, 11008, 32, 32),
    "llava-hf/llava-1.5-13b-hf": (5120, 13824, 40, 40),
}
_QWEN25VL_TEXT = {
    "Qwen/Qwen2.5-VL-3B-Instruct": (2048, 11008, 36, 16, 2, 151936, True),
    "Qwen/Qwen2.5-VL-7B-Instruct": (3584, 18944, 28, 28, 4, 152064, False),
}


_LANGUAGE_MODELS: dict[str, Callable[[], Any]] = {
    "meta-llama/Llama-2-7b-hf": lambda: _llama(32000, 4096, 11008, 32, 32),
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
    if name in _LLAVA_TEXT:
        return _llava(*_LLAVA_TEXT[name])
    if name in _QWEN25VL_TEXT:
        return _qwen25vl(*_QWEN25VL_TEXT[name])
    return None


def _llama(vocabulary: int, width: int, mlp: int, layers: int, heads: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
    )


def _llava(width: int, mlp: int, layers: int, heads: int) -> Any:
    text = _llama(32064, width, mlp, layers, heads)
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


def _qwen25vl(width: int, mlp: int, layers: int, heads: int, kv_heads: int, vocabulary: int, tied: bool) -> Any:
    text = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    }
    vision = {"hidden_size": 1280, "out_hidden_size": width, "tokens_per_second": 2}
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied)
