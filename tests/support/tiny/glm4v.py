"""GLM-4.1V and GLM-4.5V, random: images of 3 x 4 visual tokens and more, videos of two layers in turn.

Records with their pictures are Qwen's.
"""

from __future__ import annotations

from functools import partial

import torch
from transformers import Glm4vConfig, Glm4vForConditionalGeneration, Glm4vMoeConfig, Glm4vMoeForConditionalGeneration
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

from subtoken_train.families.qwen_vl import Glm4vFamily, Glm4vMoeFamily, GlmProcessor
from tests.support.tiny import TinyFamily, TinyPicture
from tests.support.tiny.qwen import BLOCKS, EXPERTS, qwen_tokenizer
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


def glm_picture(family: Glm4vFamily, generator: torch.Generator, sample: int, image: int, images: int) -> TinyPicture:
    """An image between its marks, or a video whose two layers are such images with a word behind each."""
    video = bool((sample + image) % 2)
    layers, high, wide = 2 if video else 1, 3, 4 + sample + image
    pixels = torch.randn(layers * 4 * high * wide, 3 * 2 * 14 * 14, generator=generator)
    start, visual, end, opened, closed = map(family.tokenizer.convert_tokens_to_ids, SPECIAL[1:6])
    grid, run = [layers, 2 * high, 2 * wide], [visual] * (high * wide)
    if not video:
        return TinyPicture(run, pixels, grid, [start], [end])
    words = torch.randint(20, 60, (2,), generator=generator).tolist()
    return TinyPicture([*run, end, words[0], start, *run], pixels, grid, [opened, start], [end, words[1], closed])


FAMILIES = (
    TinyFamily("glm4v", glm_family, glm_picture, order=14),
    TinyFamily("glm4v_moe", partial(glm_family, experts=True), glm_picture, order=14, crossed=False),
)
