"""LLaVA-OneVision: images in tiles where they are alone, whole where they are several, and a video among them."""

from __future__ import annotations

from functools import partial

import torch

from subtoken_train.families.family import Family
from subtoken_train.families.llava.onevision import LlavaOnevisionFamily
from tests.support.onevision_tiny import SIDE, onevision_family
from tests.support.tiny import TinyFamily, TinyPicture


def picture(family: Family, generator: torch.Generator, sample: int, image: int, images: int) -> TinyPicture:
    """The second sample's first picture is a video of two frames; an image stands alone, or whole beside others.

    An image in tiles has one row and so one newline: of three, all alike before the first layer, the outer two would be
    as near to the middle one, and what merges dropped tokens would choose between them by rounding.
    """
    assert isinstance(family, LlavaOnevisionFamily)
    placeholder, row = family.image_token_id, [1, 10, 40]
    if sample == 1 and image == 0:
        placeholder, row = family.model.config.video_token_id, [2, 0, 0]
    elif images == 1:
        size = (10, 40 + 20 * sample)
        row = [family.layout.tiles(size), *size]
    pixels = torch.randn(row[0], 3, SIDE, SIDE, generator=generator)
    assert placeholder is not None
    return TinyPicture([placeholder] * family.visual_rows(row), pixels, row)


FAMILIES = (TinyFamily("llava_onevision", partial(onevision_family, layers=3), picture, order=3),)
