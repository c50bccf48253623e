"""InternVL3: tiles of 4 x 4 patches, four visual tokens each; pictures of one tile, and of several with the whole."""

from __future__ import annotations

import torch

from subtoken_train.families.family import Family
from tests.support.internvl_tiny import SIDE, internvl_family
from tests.support.tiny import TinyFamily, TinyPicture


def picture(family: Family, generator: torch.Generator, sample: int, image: int, images: int) -> TinyPicture:
    """An image of 1, 3 or 4 tiles between its marks."""
    tiles = (3, 1, 4)[(sample + image) % 3]
    start, end = (family.tokenizer.convert_tokens_to_ids(mark) for mark in ("<img>", "</img>"))
    pixels = torch.randn(tiles, 3, SIDE, SIDE, generator=generator)
    return TinyPicture([family.image_token_id] * (4 * tiles), pixels, None, [start], [end])


FAMILIES = (TinyFamily("internvl", internvl_family, picture, order=9),)
