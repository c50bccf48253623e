"""LLaVA-NeXT on Mistral; pictures of two to five tiles, cropped on either side or on none."""

from __future__ import annotations

import torch

from subtoken_train.families.family import Family
from subtoken_train.families.llava.next import LlavaNextFamily
from tests.support.next_tiny import SIDE, SIZES, next_family
from tests.support.tiny import TinyFamily, TinyPicture


def picture(family: Family, generator: torch.Generator, sample: int, image: int, images: int) -> TinyPicture:
    """Of another size each."""
    assert isinstance(family, LlavaNextFamily)
    size = SIZES[(sample + image) % len(SIZES)]
    tiles = family.layout.tiles(size)
    pixels = torch.randn(tiles, 3, SIDE, SIDE, generator=generator)
    return TinyPicture([family.image_token_id] * family.visual_tokens(size), pixels, [tiles, *size])


FAMILIES = (TinyFamily("llava_next", next_family, picture, order=3),)
