"""Pictures: damaged, enormous, none at all, or of the forms that cameras, scanners and artists make."""

import io
import random
import struct
import warnings
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from tests.hostile.case import Answer, Case, Expect, Place, Reference, same
from tests.hostile.grammar import damaged, no_file
from tests.hostile.tensors import canary_pickle
from tests.support.run_folders import encoded

FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
Image.init()  # which makes all of its readers known
PIXELS = 89_478_485  # more than this is no picture for a batch
SUFFIXES = ("png", "jpg", "gif", "bmp", "tiff", "webp", "ppm", "ico")
NAMED = ("[red]a.png", "a\nb.png", "-a.png", "ä.png", "a" * 200 + ".png", "a b.png", "\x1b[31ma.png")


def right_picture(content: bytes) -> Image.Image | None:
    """The RGB picture of an encoded one, by another reading than the package's; None where it must be refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(io.BytesIO(content), formats=[name for name in FORMATS if name in Image.OPEN]) as image:
                if not 0 < image.width * image.height <= PIXELS:
                    return None
                image.load()
                return rgb(ImageOps.exif_transpose(image))
        except Exception:
            return None


def rgb(image: Image.Image) -> Image.Image:
    values = np.asarray(image).astype(np.float64)
    if image.mode.startswith("I;16") or image.mode == "I":
        return Image.fromarray(np.clip(np.round(values / 257), 0, 255).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("numbers without a depth")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        with_alpha = np.asarray(image.convert("RGBA")).astype(np.float64)
        alpha = with_alpha[..., 3:] / 255
        return Image.fromarray(np.round(with_alpha[..., :3] * alpha + 255 * (1 - alpha)).astype(np.uint8))
    return image.convert("RGB")


def pixels(right: Image.Image | None) -> Reference:
    def difference(answer: Answer) -> str | None:
        got = answer.value
        if right is None or not isinstance(got, Image.Image):
            return f"returned {type(got).__name__}, and there is no picture in the file"
        whole = got.mode == "RGB" and got.size == right.size
        if whole and int(np.abs(np.asarray(got).astype(int) - np.asarray(right).astype(int)).max()) <= 1:
            return None
        return f"opened as {got.mode} {got.size}, and not pixel for pixel as another reader"

    return difference


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, body: bytes = b"", depth: int = 8, colour: int = 2, more: bytes = b"") -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + more + chunk(b"IDAT", zlib.compress(body)) + chunk(b"IEND", b"")


@cache
def bombs() -> dict[str, bytes]:
    long = b"k\0\0" + zlib.compress(b"x" * 100_000_000)
    bmp = struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, 50_000, 50_000, 1, 24, 0, 0, 0, 0, 0, 0)
    return {
        "a PNG of 13,000 x 13,000": png(13_000, 13_000, b"\0" * 2_000_000, colour=0),
        "a PNG of 13,000 x 13,000 of one bit": png(13_000, 13_000, b"\0" * (1626 * 13_000), depth=1, colour=0),
        "a PNG of 2**31 x 2**31": png(2**31 - 1, 2**31 - 1), "a PNG of 60,000 x 60,000": png(60_000, 60_000),
        "a PNG of 1 x 500,000,000": png(1, 500_000_000), "a PNG of no pixels": png(0, 0),
        "a PNG with a text that unpacks to 100 MB": png(4, 4, b"\0" * 52, more=chunk(b"zTXt", long)),
        "a PNG with a colour profile of 100 MB": png(4, 4, b"\0" * 52, more=chunk(b"iCCP", long)),
        "a PNG whose pixels unpack to 200 MB": png(4, 4, b"\0" * 200_000_000),
        "a BMP of 50,000 x 50,000": b"BM" + bmp, "a PPM of 50,000 x 50,000": b"P6 50000 50000 255\n" + b"\0" * 100,
        "a GIF of 65,535 x 65,535": b"GIF89a\xff\xff\xff\xff\0\0\0,\0\0\0\0\xff\xff\xff\xff\0\x02\x00;",
        "a TIFF whose directories go round": b"II*\0\x08\0\0\0" + b"\0\0" + b"\x08\0\0\0",
        "an EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n(../CANARY) (w) file closefile\n",
        "an SVG": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
        "a pickle": canary_pickle(),
        "a numpy file of objects": b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'shape': (1,), }" + canary_pickle(),
        "an FPX": b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\0" * 600, "a WMF": b"\xd7\xcd\xc6\x9a\0\0" + b"\0" * 60,
        "words": b"no picture at all",
    }  # fmt: skip


CODERS = {"jpg": "JPEG", "png": "PNG", "tiff": "TIFF", "webp": "WEBP", "gif": "GIF"}
ORIENTATION = 0x0112
MODES = {
    "1": ("png", "tiff"), "L": ("png", "jpg", "tiff"), "P": ("png", "gif"), "RGBA": ("png", "tiff", "webp"),
    "LA": ("png",), "CMYK": ("jpg", "tiff"), "I;16": ("png", "tiff"), "F": ("tiff",), "YCbCr": ("jpg",),
    "transparent P": ("png", "gif"), "RGB with a transparent colour": ("png",),
}  # fmt: skip
TOO_LONG = ((60_000, 1), (1, 60_000), (20_000, 2), (3, 50_000))
LONG = ((40, 1), (1, 30), (300, 20), (17, 200))
Made = tuple[str, bytes, str]  # a suffix, a picture's bytes and what it is


def noise(draw: random.Random) -> np.random.Generator:
    return np.random.default_rng(draw.randrange(2**31))


def scene(draw: random.Random, width: int = 40, height: int = 24) -> Image.Image:
    made = noise(draw).integers(0, 256, (height, width, 3), np.uint8)
    made[: height // 3, : width // 2] = (200, 30, 30)
    return Image.fromarray(made)


def turned(draw: random.Random) -> Made:
    suffix = draw.choice(("jpg", "png", "tiff", "webp"))
    note = draw.choice((1, 2, 3, 4, 5, 6, 7, 8, 8, 6, 3, 0, 9, 255))
    exif = Image.Exif()
    exif[ORIENTATION] = note
    settings = {"lossless": True} if suffix == "webp" else {}
    return suffix, encoded(scene(draw), CODERS[suffix], exif=exif, **settings), f"orientation {note}"


def of_mode(draw: random.Random) -> Made:
    mode = draw.choice(list(MODES))
    suffix, picture = draw.choice(MODES[mode]), scene(draw)
    settings: dict[str, Any] = {}
    if mode == "I;16":
        wide = noise(draw).integers(0, 65536, (24, 40)).astype(np.uint16)
        wide[0, :2] = 0, 65535
        picture = Image.fromarray(wide)
    elif mode == "F":
        picture = Image.fromarray(noise(draw).random((24, 40)).astype(np.float32))
    elif mode in ("RGBA", "LA"):
        picture = picture.convert(mode)
        picture.putalpha(Image.fromarray(noise(draw).choice([0, 255, 128], (24, 40)).astype(np.uint8)))
        settings = {"lossless": True} if suffix == "webp" else {}
    elif mode == "transparent P":
        picture, settings = picture.quantize(16), {"transparency": 3}
    elif mode.startswith("RGB with"):
        settings = {"transparency": (200, 30, 30)}
    else:
        picture = picture.convert(mode)
    return suffix, encoded(picture, CODERS[suffix], **settings), f"mode {mode}"


def long_one(draw: random.Random) -> Made:
    """A picture of one row or column, which no tower reads once it is resized."""
    size = draw.choice((*TOO_LONG, *LONG))
    return "png", encoded(Image.new("RGB", size, (200, 30, 30))), f"{size}"


def spoilt(draw: random.Random, pool: Path) -> Made:
    """An encoded picture with damage, or one that is none, or takes more room than it shows."""
    suffix = draw.choice(SUFFIXES)
    if draw.random() < 0.5:
        return suffix, *damaged(draw, (pool / f"images/a.{suffix}").read_bytes())
    what, content = draw.choice(list(bombs().items()))
    return suffix, content, what


def damage(draw: random.Random, place: Place) -> Case:
    kind = draw.choice((*["spoilt"] * 6, "file", "name", "whole"))
    suffix, content, what = spoilt(draw, place.pool)
    if kind != "spoilt":
        content, what = (place.pool / f"images/a.{suffix}").read_bytes(), kind
    name = draw.choice(NAMED) if kind == "name" else f"a.{suffix}"
    path = place.write(name, content)
    what = no_file(draw, path) if kind == "file" else what
    return opening(draw, place, path, f"{suffix}, {what}", None if kind == "file" else right_picture(content))


def forms(draw: random.Random, place: Place) -> Case:
    kind = draw.choice((turned, turned, of_mode, of_mode, long_one))
    suffix, content, what = kind(draw)
    path, right = place.write(f"a.{suffix}", content), right_picture(content)
    return opening(draw, place, path, f"{suffix}, {what}", right, seen=what not in map(str, TOO_LONG))


def opening(
    draw: random.Random, place: Place, path: Path, what: str, right: Image.Image | None, seen: bool = True
) -> Case:
    """One rule for every picture: what another reader opens is opened, pixel for pixel; ``seen``: a tower reads it."""
    expect = Expect.REFUSED if right is None else Expect.TAKEN
    if draw.random() < 0.6:
        from subtoken_train.datasets.image_sources import open_image

        return Case(f"open_image {what}", lambda: open_image(path), expect, reference=pixels(right))
    words = [*place.words("generate --adapter {vlm} --prompt 'what ?' --max-new-tokens 2"), f"--image={path.name}"]
    reference = None if right is None else same(place, words, files={path.name: encoded(right)})
    return Case(f"generate {what}", words, expect if seen else Expect.REFUSED, reference=reference)
