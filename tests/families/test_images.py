"""Padding to a square, and what a video is."""

import numpy as np
import pytest
import torch
from PIL import Image

from subtoken_train.families.images import Video, check_square, pad_to_square, to_rgb

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
