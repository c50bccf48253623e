"""Padding to a square, and what a video is."""

import numpy as np
import pytest
import torch
from PIL import Image

from subtoken_train.families.images import Video, check_square, pad_to_square, to_rgb
from subtoken_train.inference.prompt_inputs import inputs_of
from tests.support.tiny.glm4v import glm_family
from tests.support.tiny.idefics3 import idefics_family
from tests.support.tiny.internvl import internvl_family
from tests.support.tiny.llava import build
from tests.support.tiny.llava_next import next_family
from tests.support.tiny.llava_onevision import onevision_family
from tests.support.tiny.mistral3 import mistral3_family
from tests.support.tiny.qwen import qwen2_family, qwen3_family, qwen_family

FILL = (10, 20, 30)


@pytest.mark.parametrize(("size", "box"), [((6, 2), (0, 2, 6, 4)), ((2, 6), (2, 0, 4, 6)), ((3, 2), (0, 0, 3, 2))])
def test_the_image_is_centred_on_the_fill_colour(size, box):
    pixels = np.asarray(pad_to_square(Image.new("RGB", size, (255, 255, 255)), FILL))
    expected = np.full((max(size), max(size), 3), FILL, np.uint8)
    left, top, right, bottom = box
    expected[top:bottom, left:right] = 255
    assert np.array_equal(pixels, expected)


def test_a_square_image_is_returned_as_it_is():
    image = Image.new("RGB", (4, 4))
    assert pad_to_square(image, FILL) is image


@pytest.mark.parametrize("thing", [None, 5, "a.png"])
def test_what_is_no_image_is_refused_in_words(thing):
    with pytest.raises(ValueError, match=r"^image 1 is not an image; open it with PIL first$"):
        to_rgb(thing, "image 1")


def test_a_video_is_images_or_a_tensor_of_them():
    frames = torch.randint(256, (3, 3, 4, 6), dtype=torch.uint8)
    shown = Video(frames, 2)
    assert (shown.size, shown.fps, len(shown.frames)) == ((4, 6), 2.0, 3)
    assert all(np.array_equal(np.asarray(a), b.permute(1, 2, 0)) for a, b in zip(shown.frames, frames, strict=True))
    assert Video(shown.frames, 2.0) == shown
    assert Video([Image.new("L", (6, 4))]).frames[0].mode == "RGB"


BAD = {
    "has no frames; give at least one": ([], 1.0),
    "different sizes, 6 x 4 and 4 x 6 pixels": ([Image.new("RGB", (6, 4)), Image.new("RGB", (4, 6))], 1.0),
    "frame 1 of a video is not an image": (["a.png"], 1.0),
    "fps=0 of a video": ([Image.new("RGB", (6, 4))], 0),
    "fps=nan of a video": ([Image.new("RGB", (6, 4))], float("nan")),
    "fps='2' of a video": ([Image.new("RGB", (6, 4))], "2"),
    r"torch.float32 \[2, 3, 4, 4\]; a uint8 tensor": (torch.zeros(2, 3, 4, 4), 1.0),
    r"torch.uint8 \[2, 4, 4, 3\]; a uint8 tensor": (torch.zeros(2, 4, 4, 3, dtype=torch.uint8), 1.0),
    "hold no pixel": (torch.zeros(0, 3, 4, 4, dtype=torch.uint8), 1.0),
}


@pytest.mark.parametrize("words", BAD)
def test_what_is_no_video_is_refused_in_words(words):
    with pytest.raises(ValueError, match=words):
        Video(*BAD[words])


@pytest.mark.parametrize("size", [(60_000, 1), (1, 60_000), (13_378, 13_377), (60_000, 1400)])
def test_a_square_that_would_take_all_memory_is_refused_before_it_is_made(size, monkeypatch):
    image = Image.new("RGB", size)
    monkeypatch.setattr(Image, "new", None)
    words = rf"^an image of {size[0]:,} x {size[1]:,} pixels is padded to a square, whose side may have at most 13,377 "
    with pytest.raises(ValueError, match=words):
        pad_to_square(image, FILL)


def test_thin_images_below_it_are_padded():
    assert pad_to_square(Image.new("RGB", (3000, 1)), FILL).size == (3000, 3000)
    check_square(1, 13_377)
    check_square(20_000, 20_000)  # nothing is added to a square


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
