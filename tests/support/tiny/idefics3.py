"""Idefics3 and SmolVLM: tiles of 4 x 4 patches, four visual tokens each, behind marks of text."""

from __future__ import annotations

from functools import partial

import torch

from subtoken_train.families.family import Family
from tests.support.idefics_tiny import SIDE, idefics_family
from tests.support.tiny import TinyFamily, TinyPicture


def picture(family: Family, generator: torch.Generator, sample: int, image: int, images: int) -> TinyPicture:
    """An image of 1, 4 or 5 tiles, each between its marks."""
    tiles = (5, 1, 4)[(sample + image) % 3]
    marks = ("<fake_token_around_image>", "<row_1_col_1>", "<global-img>")
    fake, row, whole = (family.tokenizer.convert_tokens_to_ids(mark) for mark in marks)
    shown = [family.image_token_id] * 4
    cut = [*shown, fake, row] * (tiles - 2) + [*shown, fake, whole] * (tiles > 1)
    pixels = torch.randn(tiles, 3, SIDE, SIDE, generator=generator)
    return TinyPicture(cut + shown, pixels, None, [fake, row if tiles > 1 else whole], [fake])


FAMILIES = (
    TinyFamily("smolvlm", idefics_family, picture, order=12),
    TinyFamily("idefics3", partial(idefics_family, "idefics3"), picture, order=12, crossed=False),
)
