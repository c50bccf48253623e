"""Pictures that cameras, scanners and artists make: turned by a note, of other modes, with holes, and far too long."""

from __future__ import annotations

import io
import random

import numpy as np
from PIL import Image

from tests.hostile.case import Case, Expect, Place
from tests.hostile.decoding import as_png, right_picture
from tests.hostile.pictures import opening
from tests.hostile.pool import VLM
from tests.hostile.references import same

TURNED = {"jpg": "JPEG", "png": "PNG", "tiff": "TIFF", "webp": "WEBP"}
"""Formats that carry a note of how the camera was held."""
ORIENTATION = 0x0112
MODES = {
    "1": ("png", "tiff"), "L": ("png", "jpg", "tiff"), "P": ("png", "gif"), "RGBA": ("png", "tiff", "webp"),
    "LA": ("png",), "CMYK": ("jpg", "tiff"), "I;16": ("png", "tiff"), "F": ("tiff",), "YCbCr": ("jpg",),
    "transparent P": ("png", "gif"), "RGB with a transparent colour": ("png",),
}  # fmt: skip
TOO_LONG = ((60_000, 1), (1, 60_000), (20_000, 2), (3, 50_000))
LONG = ((40, 1), (1, 30), (300, 20), (17, 200))
NAMES = {"jpg": "JPEG", "png": "PNG", "tiff": "TIFF", "webp": "WEBP", "gif": "GIF"}


def scene(draw: random.Random, width: int = 40, height: int = 24) -> Image.Image:
    """A picture of which every corner is another."""
    made = np.random.default_rng(draw.randrange(2**31)).integers(0, 256, (height, width, 3), np.uint8)
    made[: height // 3, : width // 2] = (200, 30, 30)
    return Image.fromarray(made)


def turned(draw: random.Random) -> tuple[str, bytes, str]:
    """A picture with a note of its orientation, an odd one at times."""
    suffix, note = draw.choice(list(TURNED)), draw.choice((1, 2, 3, 4, 5, 6, 7, 8, 8, 6, 3, 0, 9, 255))
    picture = scene(draw)
    exif = Image.Exif()
    exif[ORIENTATION] = note
    whole = io.BytesIO()
    picture.save(whole, TURNED[suffix], exif=exif, **({"lossless": True} if suffix == "webp" else {}))
    return suffix, whole.getvalue(), f"orientation {note}"


def of_mode(draw: random.Random) -> tuple[str, bytes, str]:
    """A picture of a mode that is not RGB."""
    mode = draw.choice(list(MODES))
    suffix, picture, settings = draw.choice(MODES[mode]), scene(draw), {}
    if mode == "I;16":
        wide = np.random.default_rng(draw.randrange(2**31)).integers(0, 65536, (24, 40)).astype(np.uint16)
        wide[0, :2] = 0, 65535
        picture = Image.fromarray(wide)
    elif mode == "F":
        values = np.random.default_rng(draw.randrange(2**31)).random((24, 40)).astype(np.float32)
        values[0, :2] = 0.0, 1.0
        picture = Image.fromarray(values)
    elif mode in ("RGBA", "LA"):
        picture = picture.convert(mode)
        alpha = np.random.default_rng(draw.randrange(2**31)).choice([0, 255, 128], (24, 40)).astype(np.uint8)
        picture.putalpha(Image.fromarray(alpha))
        settings = {"lossless": True} if suffix == "webp" else {}
    elif mode == "transparent P":
        picture, settings = picture.quantize(16), {"transparency": 3}
    elif mode.startswith("RGB with"):
        settings = {"transparency": (200, 30, 30)}
    else:
        picture = picture.convert(mode)
    whole = io.BytesIO()
    picture.save(whole, NAMES[suffix], **settings)
    return suffix, whole.getvalue(), f"mode {mode}"


def make(draw: random.Random, place: Place) -> Case:
    """A picture of another form; it is read as it is meant, or refused where no model can hold it."""
    kind = draw.choice((turned, turned, of_mode, of_mode, None))
    if kind is not None:
        suffix, content, what = kind(draw)
        path = place.write(f"a.{suffix}", content)
        return opening(draw, place, path, f"{suffix}, {what}", right_picture(content))
    too_long = draw.random() < 0.6
    size = draw.choice(TOO_LONG if too_long else LONG)
    content = as_png(Image.new("RGB", size, (200, 30, 30)) if too_long else scene(draw, *size))
    path = place.write("a.png", content)
    if draw.random() < 0.4:  # the picture itself is no larger than any other
        return (
            opening(draw, place, path, f"{size} to be opened", right_picture(content))
            if not too_long
            else _whole(place)
        )
    words = ["generate", "--adapter", str(place.pool / "adapters" / VLM), "--image=a.png", "--prompt", "what ?"]
    words += ["--max-new-tokens", "1"]
    expect = Expect.REFUSED if too_long else Expect.TAKEN
    return Case(f"generate {size}", words, expect, reference=same(place, words, files={"a.png": content}))


def _whole(place: Place) -> Case:
    """A picture that is very long and small in bytes, opened and not given to a model."""
    from subtoken_train.datasets.image_sources import open_image
    from tests.hostile.decoding import pixels

    path = place.work / "a.png"
    reference = pixels(right_picture(path.read_bytes()))
    return Case("open_image of a long one", lambda: open_image(path), Expect.TAKEN, reference=reference)
