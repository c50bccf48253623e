"""Qwen2.5-VL; images of 3 x 4 visual tokens and more."""

from __future__ import annotations

import torch

from subtoken_train.families.family import Family
from tests.support.qwen_tiny import qwen_family
from tests.support.tiny import TinyFamily, TinyPicture

ORDER = 1


def picture(family: Family, generator: torch.Generator, sample: int, image: int, images: int) -> TinyPicture:
    """An image between Qwen's marks."""
    assert family.image_token_id is not None
    high, wide = 3, 4 + sample + image
    pixels = torch.randn(4 * high * wide, 1176, generator=generator)
    start, end = (family.tokenizer.convert_tokens_to_ids(f"<|vision_{x}|>") for x in ("start", "end"))
    visual = [family.image_token_id] * (high * wide)
    return TinyPicture(visual, pixels, [1, 2 * high, 2 * wide], [start], [end])


FAMILIES = (TinyFamily("qwen2_5_vl", qwen_family, picture),)
