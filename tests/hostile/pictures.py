"""Images that are damaged, enormous, or no images."""

from __future__ import annotations

import random
import struct
import zlib
from pathlib import Path

from PIL import Image

from tests.hostile.case import Case, Expect, Place
from tests.hostile.decoding import as_png, pixels, right_picture
from tests.hostile.pool import VLM
from tests.hostile.references import same
from tests.hostile.tensor_files import canary_pickle
from tests.hostile.values import damaged, no_file

SUFFIXES = ("png", "jpg", "gif", "bmp", "tiff", "webp", "ppm", "ico")


def chunk(kind: bytes, content: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def spoilt(draw: random.Random, content: bytes, form: str) -> tuple[bytes, str]:
    """A picture that is ``damaged``, or a bomb in its place; and what it is."""
    if form == "damaged":
        return damaged(draw, content)
    found = bombs()
    what = draw.choice(list(found))
    return found[what], what


def png(width: int, height: int, body: bytes = b"", depth: int = 8, colour: int = 2, more: bytes = b"") -> bytes:
    """A PNG that declares a size, whatever it holds."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + more + chunk(b"IDAT", zlib.compress(body)) + chunk(b"IEND", b"")
    )


def bombs() -> dict[str, bytes]:
    """Small files that ask for much."""
    return {
        "a PNG of 13,000 x 13,000": png(13_000, 13_000, b"\0" * 2_000_000, colour=0),
        "a PNG of 13,000 x 13,000 of one bit": png(13_000, 13_000, b"\0" * (1626 * 13_000), depth=1, colour=0),
        "a PNG of 2**31 x 2**31": png(2**31 - 1, 2**31 - 1),
        "a PNG of 60,000 x 60,000": png(60_000, 60_000),
        "a PNG of 1 x 500,000,000": png(1, 500_000_000),
        "a PNG of no pixels": png(0, 0),
        "a PNG with a text that unpacks to 100 MB": png(4, 4, b"\0" * 52, more=chunk(b"zTXt",
        b"k\0\0" + zlib.compress(b"x" * 100_000_000))),
        "a PNG with a colour profile of 100 MB": png(4, 4, b"\0" * 52, more=chunk(b"iCCP",
        b"k\0\0" + zlib.compress(b"x" * 100_000_000))),
        "a PNG whose pixels unpack to 200 MB": png(4, 4, b"\0" * 200_000_000),
        "a BMP of 50,000 x 50,000": b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, 50_000, 50_000, 1, 24,
        0, 0, 0, 0, 0, 0),
        "a PPM of 50,000 x 50,000": b"P6 50000 50000 255\n" + b"\0" * 100,
        "a GIF of 65,535 x 65,535": b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0,
        0) + b",\0\0\0\0\xff\xff\xff\xff\0\x02\x00;",
        "a TIFF whose directories go round": b"II*\0\x08\0\0\0" + b"\0\0" + b"\x08\0\0\0",
        "an EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n(../CANARY) (w) file closefile\n",
        "an SVG": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
        "a pickle": canary_pickle(),
        "a numpy file of objects": b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'shape': (1,), }" + canary_pickle(),
        "an FPX": b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\0" * 600,
        "a WMF": b"\xd7\xcd\xc6\x9a\0\0" + b"\0" * 60,
        "words": b"no picture at all",
    }  # fmt: skip


NAMED = ("[red]a.png", "a\nb.png", "-a.png", "ä.png", "a" * 200 + ".png", "a b.png", "\x1b[31ma.png")


def make(draw: random.Random, place: Place) -> Case:
    """An image that is none, or that is one under an odd name."""
    suffix = draw.choice(SUFFIXES)
    path = place.copy(f"images/a.{suffix}", f"a.{suffix}")
    kind = draw.choice(("damage", "damage", "damage", "bomb", "bomb", "bomb", "file", "name", "control"))
    if kind == "damage":
        content, what = damaged(draw, path.read_bytes())
        path.write_bytes(content)
    elif kind == "bomb":
        found = bombs()
        what = draw.choice(list(found))
        path.write_bytes(found[what])
    elif kind == "file":
        return opening(draw, place, path, f"{suffix}, {no_file(draw, path)}", None)
    elif kind == "name":
        name = draw.choice(NAMED)
        path = path.rename(path.with_name(name))
        what = f"named {name[:20]!r}"
    else:
        what = "whole"
    return opening(draw, place, path, f"{suffix}, {what}", right_picture(path.read_bytes()))


def opening(draw: random.Random, place: Place, path: Path, what: str, right: Image.Image | None) -> Case:
    """An image given to what opens one; it must be this picture, or be refused where there is none."""
    expect = Expect.REFUSED if right is None else Expect.TAKEN
    if draw.random() < 0.6:
        from subtoken_train.datasets.image_sources import open_image

        return Case(f"open_image {what}", lambda: open_image(path), expect, reference=pixels(right))
    words = ["generate", "--adapter", str(place.pool / "adapters" / VLM), f"--image={path.name}", "--prompt", "what ?"]
    words += ["--max-new-tokens", "2"]
    place.copies.clear()
    reference = None if right is None else same(place, words, files={path.name: as_png(right)})
    return Case(f"generate {what}", words, expect, reference=reference)
