"""Qwen's VLMs; images of 3 x 4 visual tokens and more, and videos of two layers in turn."""

from __future__ import annotations

from functools import partial

import torch

from subtoken_train.families.qwen_vl.model import QwenVLFamily
from tests.support.qwen_tiny import qwen2_family, qwen3_family, qwen_family
from tests.support.tiny import TinyFamily, TinyPicture

FRAMES = (4, 2.0)
"""Frames of a video, and a second's."""


def qwen_picture(family: QwenVLFamily, generator: torch.Generator, sample: int, image: int, images: int) -> TinyPicture:
    """An image of 3 x 4 visual tokens and more, or a video of two such layers, between Qwen's marks."""
    video = bool((sample + image) % 2)
    layers, high, wide = 2 if video else 1, 3, 4 + sample + image
    side = family.model.config.vision_config.patch_size
    pixels = torch.randn(layers * 4 * high * wide, 3 * 2 * side * side, generator=generator)
    names = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    start, end, of_image, of_video = map(family.tokenizer.convert_tokens_to_ids, names)
    visual = [of_video if video else of_image] * (high * wide)
    if video and family.name.startswith("qwen3_vl"):
        words = torch.randint(10, 60, (6,), generator=generator).tolist()
        visual = [*words[:3], start, *visual, end, *words[3:], start, *visual]
    else:
        visual = layers * visual
    seconds = 2 / FRAMES[1] if video else 0.0
    grid = [layers, 2 * high, 2 * wide]
    return TinyPicture(visual, pixels, grid, [start], [end], seconds if family.name == "qwen2_5_vl" else None)


FAMILIES = (
    TinyFamily("qwen2_5_vl", qwen_family, qwen_picture, order=1),
    TinyFamily("qwen2_vl", qwen2_family, qwen_picture, order=10),
    TinyFamily("qwen3_vl", qwen3_family, qwen_picture, order=11),
    TinyFamily("qwen3_vl_moe", partial(qwen3_family, experts=True), qwen_picture, order=14, crossed=False),
)
