"""Mistral3 around Mistral's and Ministral 3's decoders: pictures of several sizes, marks of text between their rows."""

from __future__ import annotations

from functools import partial

import torch

from subtoken_train.families.family import Family
from tests.support.mistral_tiny import PATCH, mistral3_family
from tests.support.tiny import TinyFamily, TinyPicture


def picture(family: Family, generator: torch.Generator, sample: int, image: int, images: int) -> TinyPicture:
    """An image of 3 x 3 visual tokens and more."""
    rows, columns = 3, 3 + sample + image
    end, row = (family.tokenizer.convert_tokens_to_ids(mark) for mark in ("[IMG_END]", "[IMG_BREAK]"))
    visual = [*[family.image_token_id] * columns, row] * rows
    pixels = torch.randn(4 * rows * columns, 3 * PATCH**2, generator=generator)
    return TinyPicture(visual[:-1], pixels, [1, 2 * rows, 2 * columns], [], [end])


FAMILIES = (
    TinyFamily("mistral3", mistral3_family, picture, order=13),
    TinyFamily("mistral3_ministral", partial(mistral3_family, "ministral3"), picture, order=13, crossed=False),
)
