"""Pictures are read upright, in RGB, on white, whatever their file is; padding to a square; what a video is."""

import io
import warnings

import numpy as np
import pytest
from PIL import Image

from subtoken_train.datasets.image_sources import EncodedImage, open_image
from subtoken_train.families.images import Video, pad_to_square, to_rgb
from subtoken_train.inference.prompt_inputs import inputs_of
from tests.support.refusals import refuses
from tests.support.run_folders import encoded
from tests.support.tiny import tiny_families

UPRIGHT = np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8)
STORED = {
    1: UPRIGHT,
    2: UPRIGHT[:, ::-1],
    3: UPRIGHT[::-1, ::-1],
    4: UPRIGHT[::-1],
    5: UPRIGHT.transpose(1, 0, 2),
    6: np.rot90(UPRIGHT, 1),
    7: UPRIGHT.transpose(1, 0, 2)[::-1, ::-1],
    8: np.rot90(UPRIGHT, -1),
}
"""How a camera stores the picture under each orientation, from EXIF's own words: where row 0 and column 0 are."""
LOSSLESS = {"PNG": {}, "WEBP": {"lossless": True, "exact": True}, "TIFF": {}}
FILL = (10, 20, 30)


def tagged(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[274] = orientation
    return exif


def content(pixels: np.ndarray, kind: str, **options: object) -> bytes:
    return encoded(Image.fromarray(np.ascontiguousarray(pixels)), kind, **options)


def read(encoded: bytes) -> np.ndarray:
    """What every reader sees, both of a file and of an object that somebody opened."""
    from_file = np.asarray(open_image(EncodedImage(lambda: encoded, "row 1")))
    with Image.open(io.BytesIO(encoded)) as image:
        assert np.array_equal(np.asarray(to_rgb(image, "image 1")), from_file)
    return from_file


@pytest.mark.parametrize("kind", LOSSLESS)
@pytest.mark.parametrize("orientation", STORED)
def test_every_orientation_is_turned_upright_pixel_for_pixel(kind, orientation):
    assert np.array_equal(read(content(STORED[orientation], kind, exif=tagged(orientation), **LOSSLESS[kind])), UPRIGHT)


@pytest.mark.parametrize("text", ['tiff:Orientation="6"', "<tiff:Orientation>6</tiff:Orientation>"])
def test_xmp_tells_it_where_exif_does_not(text):
    encoded = content(STORED[6], "WEBP", lossless=True, exact=True, xmp=f"<x {text}/>".encode())
    assert np.array_equal(read(encoded), UPRIGHT)


@pytest.mark.parametrize("orientation", [0, 9, 255])
def test_an_orientation_that_is_none_turns_nothing(orientation):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(read(content(UPRIGHT, "PNG", exif=tagged(orientation))), UPRIGHT)


def test_damaged_exif_leaves_the_picture_as_it_is_stored():
    for damaged in (tagged(6).tobytes()[:-12], b"Exif\x00\x00" + b"\x99" * 30, b"Exif\x00\x00MM"):
        assert np.array_equal(read(content(UPRIGHT, "PNG", exif=damaged)), UPRIGHT)


GREY = np.array([[0, 1, 128, 129, 257, 385, 386, 32_768, 65_278, 65_535]])
GREY_8 = np.array([[0, 0, 0, 1, 1, 1, 2, 128, 254, 255]])


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM", "<u2", ">u2"])
def test_sixteen_bits_are_scaled_to_eight(kind):
    """In files and in memory."""
    if kind.isalpha():
        assert np.array_equal(read(content(GREY.astype(np.uint16), kind))[..., 0], GREY_8)
    else:
        assert np.array_equal(np.asarray(to_rgb(Image.fromarray(GREY.astype(kind)), "it"))[..., 2], GREY_8)


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_numbers_without_a_depth_are_refused(kind):
    encoded = content(np.zeros((2, 2), kind), "TIFF")
    with pytest.raises(ValueError, match=r"^record 'one': image row 1 cannot be read \(its numbers have no depth"):
        open_image(EncodedImage(lambda: encoded, "row 1"), "one")


def test_what_is_no_image_and_one_without_a_pixel_are_refused_in_words():
    refuses(r"^image 1 cannot be read \(it has no pixels\)", lambda: to_rgb(Image.new("RGB", (0, 4)), "image 1"))
    refuses(r"^image 1 is not an image; open it with PIL first$", to_rgb, "a.png", "image 1")


CLEAR = Image.fromarray(np.uint8([[[0, 0, 0, 0], [0, 0, 0, 255]], [[10, 20, 30, 255], [0, 0, 0, 51]]]))
ON_WHITE = np.uint8([[[255] * 3, [0] * 3], [[10, 20, 30], [204] * 3]])


def test_what_is_transparent_shows_white():
    assert np.array_equal(np.asarray(to_rgb(CLEAR, "it")), ON_WHITE)
    grey = Image.fromarray(np.uint8([[[0, 0], [0, 255]], [[9, 255], [0, 51]]]))
    assert grey.mode == "LA"
    assert np.asarray(to_rgb(grey, "it"))[..., 0].tolist() == [[255, 0], [9, 204]]
    assert np.asarray(to_rgb(grey.convert("La"), "it"))[..., 0].tolist() == [[255, 0], [9, 204]]
    assert np.array_equal(np.asarray(to_rgb(CLEAR.convert("RGBa"), "it")), ON_WHITE)


@pytest.mark.parametrize("mode", ["P", "L", "RGB", "1", "I;16"])
def test_one_transparent_colour_is_white_too(mode):
    """``tRNS`` of a PNG that has no alpha channel."""
    clear, dark, seen = {"I;16": (500, 0, 65_535), "1": (0, 1, 1), "RGB": ((1, 2, 3), (0,) * 3, (255,) * 3)}.get(
        mode, (7, 0, 9)
    )
    image = Image.new(mode, (3, 1), dark)
    if mode == "P":
        image.putpalette([0, 0, 0] * 9 + [90, 91, 92])
    image.putpixel((0, 0), clear)
    image.putpixel((2, 0), seen)
    shown = {"P": [255, 0, 90], "L": [255, 0, 9], "1": [255, 255, 255]}.get(mode, [255, 0, 255])
    assert read(encoded(image, transparency=clear))[0, :, 0].tolist() == shown


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "HSV", "LAB", "RGBX", "1", "L", "P"])
def test_every_other_mode_is_converted(mode):
    """A colour comes back, within what the mode can hold."""
    red = Image.new("RGB", (4, 4), {"1": (255,) * 3, "L": (90,) * 3, "P": (204, 51, 0)}.get(mode, (200, 30, 40)))
    assert np.abs(np.asarray(to_rgb(red.convert(mode), "it")).astype(int) - np.asarray(red)).max() <= 3


@pytest.mark.parametrize(("size", "box"), [((6, 2), (0, 2, 6, 4)), ((2, 6), (2, 0, 4, 6)), ((3, 2), (0, 0, 3, 2))])
def test_the_image_is_centred_on_the_fill_colour(size, box):
    expected = np.full((max(size), max(size), 3), FILL, np.uint8)
    left, top, right, bottom = box
    expected[top:bottom, left:right] = 255
    assert np.array_equal(np.asarray(pad_to_square(Image.new("RGB", size, (255, 255, 255)), FILL)), expected)


def test_a_video_is_images():
    shown = Video([Image.new("RGB", (6, 4))] * 3, 2)
    assert (shown.size, shown.fps, len(shown.frames)) == ((4, 6), 2.0, 3)
    assert Video(shown.frames, 2.0) == shown
    assert Video([Image.new("L", (6, 4))]).frames[0].mode == "RGB"


BAD = {
    "has no frames; give at least one": ([], 1.0),
    "different sizes, 6 x 4 and 4 x 6 pixels": ([Image.new("RGB", (6, 4)), Image.new("RGB", (4, 6))], 1.0),
    "frame 1 of a video is not an image": (["a.png"], 1.0),
    "fps=0 of a video": ([Image.new("RGB", (6, 4))], 0),
    "fps=nan of a video": ([Image.new("RGB", (6, 4))], float("nan")),
    "fps='2' of a video": ([Image.new("RGB", (6, 4))], "2"),
}


@pytest.mark.parametrize("words", BAD)
def test_what_is_no_video_is_refused_in_words(words):
    refuses(words, lambda: Video(*BAD[words]))


@pytest.mark.parametrize("size", [(60_000, 1), (1, 60_000), (13_378, 13_377), (60_000, 1400)])
def test_a_square_that_would_take_all_memory_is_refused_before_it_is_made(size, monkeypatch):
    image = Image.new("RGB", size)
    monkeypatch.setattr(Image, "new", None)
    words = rf"^a square around {size[0]:,} x {size[1]:,} pixels is larger than 13,377 a side"
    refuses(words, pad_to_square, image, FILL)


TINY = tiny_families()
THIN = [(1, 1), (2, 1), (200, 1), (1, 200)]  # widths and heights that every family sees
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
SQUARE = "a square around 60,000 x 1 pixels is larger than 13,377 a side"
RATIO = r"an image of 1 x 60000 pixels: (qwen|glm).* takes sides of 1 to 200"
SCALED = r"1 x 60000 pixels: mistral3 leaves nothing of its shorter side"
REFUSED = {"llava": SQUARE, "mistral3": SCALED, "qwen2_vl": RATIO, "qwen2_5_vl": RATIO, "qwen3_vl": RATIO}
REFUSED["glm4v"] = RATIO  # of one picture of 60,000 x 1; the other families scale it to tiles of a few pixels


@pytest.mark.parametrize("name", TOKENS)
def test_pictures_of_a_pixel_are_seen(name):
    family = TINY[name].build()
    made = [inputs_of(family, "what ?", [Image.new("RGB", size, (9, 99, 199))]) for size in THIN]
    assert [int(family.is_visual(each["input_ids"]).sum()) for each in made] == TOKENS[name]


@pytest.mark.parametrize("name", TOKENS)
@pytest.mark.parametrize("count", [1, 2])
def test_no_picture_takes_all_memory(name, count):
    family, images = TINY[name].build(), [Image.new("RGB", (60_000, 1))] * count
    refused = REFUSED | ({"llava_onevision": SQUARE} if count > 1 else {})
    if name in refused:
        refuses(refused[name], inputs_of, family, "what ?", images)
    else:
        assert inputs_of(family, "what ?", images)["pixel_values"].numel() < 100_000
