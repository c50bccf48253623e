"""What a picture is by another reading than the package's: upright, composed on white, scaled to eight bits."""

from __future__ import annotations

import io
import warnings

import numpy as np
from PIL import Image, ImageOps

from tests.hostile.case import Answer, Reference

FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
Image.init()  # which makes all of its readers known
PIXELS = 89_478_485
"""More than this is no picture for a batch."""


def right_picture(content: bytes) -> Image.Image | None:
    """The RGB picture of an encoded one; None where it must be refused."""
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
    """Eight bits of red, green and blue of a picture of any mode."""
    if image.mode.startswith("I;16") or image.mode == "I":
        grey = np.asarray(image).astype(np.float64) / 257
        return Image.fromarray(np.clip(np.round(grey), 0, 255).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        values = np.asarray(image).astype(np.float64)
        return Image.fromarray(
            np.clip(np.round(values * (255 if values.max() <= 1 else 1)), 0, 255).astype(np.uint8)
        ).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        with_alpha = np.asarray(image.convert("RGBA")).astype(np.float64)
        alpha = with_alpha[..., 3:] / 255
        mixed = with_alpha[..., :3] * alpha + 255 * (1 - alpha)
        return Image.fromarray(np.round(mixed).astype(np.uint8))
    return image.convert("RGB")


def close(got: Image.Image, right: Image.Image) -> bool:
    """Whether two pictures are the same, but for one step of rounding in a pixel."""
    if got.mode != "RGB" or got.size != right.size:
        return False
    return int(np.abs(np.asarray(got).astype(int) - np.asarray(right).astype(int)).max()) <= 1


def pixels(right: Image.Image | None) -> Reference:
    """The function must return this picture."""

    def difference(answer: Answer) -> str | None:
        got = answer.value
        if right is None or not isinstance(got, Image.Image):
            return f"returned {type(got).__name__}, and there is no picture in the file"
        return (
            None if close(got, right) else f"opened as {got.mode} {got.size}, and not pixel for pixel as another reader"
        )

    return difference


def as_png(picture: Image.Image) -> bytes:
    """A picture as a plain PNG."""
    whole = io.BytesIO()
    picture.save(whole, "PNG")
    return whole.getvalue()
