"""Padding to a square."""

import numpy as np
import pytest
from PIL import Image

from subtoken_train.families.images import pad_to_square, to_rgb

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
    with pytest.raises(ValueError, match=r"^image 1 is no image; open it with PIL first$"):
        to_rgb(thing, "image 1")
