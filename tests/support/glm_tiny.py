"""Random tiny GLM-4.1V and GLM-4.5V of the real classes; records with their pictures are Qwen's."""

from __future__ import annotations

import torch
from transformers import (
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    Glm4vMoeConfig,
    Glm4vMoeForConditionalGeneration,
)
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

from subtoken_train.families.glm4v.model import Glm4vFamily, Glm4vMoeFamily, GlmProcessor
from tests.support.qwen_tiny import BLOCKS, EXPERTS, qwen_tokenizer
from tests.support.tiny_parts import decoder_sizes

_MARKS = ("image_start", "image", "image_end", "video_start", "video_end")
SPECIAL = (
    *("<|endoftext|>", "<|begin_of_image|>", "<|image|>", "<|end_of_image|>", "<|begin_of_video|>"),
    *("<|end_of_video|>", "[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "/nothink", "<think>", "</think>"),
)


def glm_family(seed: int = 0, kv_heads: int = 2, experts: bool = False) -> Glm4vFamily:
    """Three layers of four query heads of which half of the channels are turned, a tower of four blocks, 4 x 4 places.

    With experts: the first layer has none, each other four of them and one that is shared.
    """
    torch.manual_seed(seed)
    tokenizer = qwen_tokenizer(SPECIAL, "<|user|>")
    marks = zip(_MARKS, SPECIAL[1:6], strict=True)
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(mark) for name, mark in marks}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}
    own = {"rope_parameters": rope, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    text = decoder_sizes(len(tokenizer), kv_heads, **own)
    if experts:
        text |= {"n_routed_experts" if name == "num_experts" else name: size for name, size in EXPERTS.items()}
        text |= {"head_dim": 16}
    made = (
        (Glm4vMoeConfig, Glm4vMoeForConditionalGeneration, Glm4vMoeFamily)
        if experts
        else (Glm4vConfig, Glm4vForConditionalGeneration, Glm4vFamily)
    )
    config = made[0](text_config=text, vision_config={**BLOCKS, "image_size": 56}, **ids)
    model = made[1](config).eval()
    pictures = Glm4vImageProcessorPil(size={"shortest_edge": 2 * 56 * 56, "longest_edge": 2 * 28 * 28 * 1280})
    return made[2](model, GlmProcessor(pictures, tokenizer))
