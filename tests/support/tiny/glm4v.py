"""GLM-4.1V and GLM-4.5V; images of 3 x 4 visual tokens and more, and videos of two layers in turn."""

from __future__ import annotations

from functools import partial

import torch

from subtoken_train.families.glm4v.model import Glm4vFamily
from tests.support.glm_tiny import SPECIAL, glm_family
from tests.support.tiny import TinyFamily, TinyPicture


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
