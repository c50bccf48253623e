"""LLaVA-1.5: three layers of four heads of width 16; 16 visual tokens an image."""

from __future__ import annotations

from functools import partial

import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, MistralConfig

from checkpoints.tiny_llava import build_processor
from subtoken_train.families.family import Family
from subtoken_train.families.llava import LlavaFamily
from tests.support.tiny import TinyFamily, TinyPicture
from tests.support.tiny_parts import TOWER, decoder_sizes


def build(kv_heads: int, window: int | None = None) -> LlavaFamily:
    """Of so many key-value heads; with a window, around a Mistral."""
    torch.manual_seed(0)
    tower = {**TOWER, "num_hidden_layers": 2}
    vision = CLIPVisionConfig(**tower, image_size=96, patch_size=24, projection_dim=32)
    text_class, own = (LlamaConfig, {}) if window is None else (MistralConfig, {"sliding_window": window})
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    text = text_class(**decoder_sizes(90, kv_heads, max_position_embeddings=512, **special, **own))
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=4, vision_feature_layer=-1)
    return LlavaFamily(LlavaForConditionalGeneration(config).eval(), build_processor())


def picture(family: Family, generator: torch.Generator, sample: int, image: int, images: int) -> TinyPicture:
    """A square."""
    assert family.image_token_id is not None
    return TinyPicture([family.image_token_id] * 16, torch.randn(1, 3, 96, 96, generator=generator))


FAMILIES = (
    TinyFamily("llava", partial(build, 4), picture, order=0),
    TinyFamily("llava_gqa", partial(build, 2), picture, order=0),
    TinyFamily("llava_window", partial(build, 2, 20), picture, windowed=True, order=0),
)
