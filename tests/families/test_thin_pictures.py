"""Pictures of a pixel's height work in every family as far as its processor takes them; no size takes all memory."""

from __future__ import annotations

import pytest
from PIL import Image

from subtoken_train.inference.prompt_inputs import inputs_of
from tests.support.tiny.glm4v import glm_family
from tests.support.tiny.idefics3 import idefics_family
from tests.support.tiny.internvl import internvl_family
from tests.support.tiny.llava import build
from tests.support.tiny.llava_next import next_family
from tests.support.tiny.llava_onevision import onevision_family
from tests.support.tiny.mistral3 import mistral3_family
from tests.support.tiny.qwen import qwen2_family, qwen3_family, qwen_family

FAMILIES = {
    "llava": lambda: build(2),
    "llava_next": next_family,
    "llava_onevision": onevision_family,
    "internvl": internvl_family,
    "smolvlm": idefics_family,
    "mistral3": mistral3_family,
    "qwen2_vl": qwen2_family,
    "qwen2_5_vl": qwen_family,
    "qwen3_vl": qwen3_family,
    "glm4v": glm_family,
}
THIN = [(1, 1), (2, 1), (200, 1), (1, 200)]
"""Widths and heights that every family sees."""
TOKENS = {
    "llava": [16] * 4,
    "llava_next": [24, 30, 16, 12],
    "llava_onevision": [21, 13, 13, 15],
    "internvl": [4, 12, 24, 24],
    "smolvlm": [40, 28, 16, 16],
    "mistral3": [1, 1, 13, 13],
    "qwen2_vl": [4, 6, 29, 29],
    "qwen2_5_vl": [4, 6, 29, 29],
    "qwen3_vl": [4, 6, 29, 29],
    "glm4v": [4, 6, 200, 200],
}
SQUARE = r"an image of 60,000 x 1 pixels is padded to a square, whose side may have at most 13,377 pixels"
RATIO = r"an image of 1 x 60000 pixels: (Qwen|GLM).* takes a longer side of at most 200 times the shorter one"
SCALED = r"1 x 60000 pixels: mistral3 scales the longer side to 224, which leaves nothing of the shorter one"
REFUSED = {"llava": SQUARE, "mistral3": SCALED, "qwen2_vl": RATIO, "qwen2_5_vl": RATIO, "qwen3_vl": RATIO}
REFUSED["glm4v"] = RATIO
"""Of one picture of 60,000 x 1; the other families scale it to tiles of a few pixels."""


@pytest.mark.parametrize("name", FAMILIES)
def test_pictures_of_a_pixel_are_seen(name):
    family = FAMILIES[name]()
    made = [inputs_of(family, "what ?", [Image.new("RGB", size, (9, 99, 199))]) for size in THIN]
    assert [int(family.is_visual(each["input_ids"]).sum()) for each in made] == TOKENS[name]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("count", [1, 2])
def test_no_picture_takes_all_memory(name, count):
    family, images = FAMILIES[name](), [Image.new("RGB", (60_000, 1))] * count
    refused = REFUSED | ({"llava_onevision": SQUARE} if count > 1 else {})
    if name in refused:
        with pytest.raises(ValueError, match=refused[name]):
            inputs_of(family, "what ?", images)
    else:
        made = inputs_of(family, "what ?", images)
        assert made["pixel_values"].numel() < 100_000
