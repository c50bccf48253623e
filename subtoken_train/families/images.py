"""Images and videos of a prompt: made upright RGB, padded to squares, counted; PIL only.

``rgb_pixels`` turns an image as EXIF or XMP says, shows what is transparent as white, and ignores colour profiles.
Greys of 16 bits are divided by 257; numbers without a depth (``I``, ``F``) are refused.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import ExifTags, Image, ImageOps

_WHITE_16 = 65_535


class PixelError(ValueError):
    """Pixels that cannot be shown."""


def to_rgb(image: Any, name: str) -> Image.Image:
    """Return ``rgb_pixels`` of an image that somebody opened."""
    if not isinstance(image, Image.Image):
        raise ValueError(f"{name} is not an image; open it with PIL first")
    try:
        return rgb_pixels(image)
    except Exception as error:  # Pillow's readers raise many kinds for broken files
        words = " ".join(str(error).split())[:160] or type(error).__name__
        raise ValueError(f"{name} cannot be read ({words}); replace the file") from None


def rgb_pixels(image: Image.Image) -> Image.Image:
    """Read an opened image's pixels as a new RGB image, turned upright, which carries no orientation any more."""
    if 0 in image.size:
        raise PixelError("it has no pixels")
    image.load()
    shown, told = _eight_bits(image), Image.Exif()
    if shown.has_transparency_data:
        shown = (shown.convert("LA") if shown.mode == "La" else shown).convert("RGBA")
        shown = Image.alpha_composite(Image.new("RGBA", shown.size, "white"), shown)
    shown = shown.convert("RGB")
    told[ExifTags.Base.Orientation] = _orientation(image)
    shown.info = {"exif": told.tobytes()}  # nothing else, whose damage would be in the way
    ImageOps.exif_transpose(shown, in_place=True)
    shown.info = {}
    return shown


def _orientation(image: Image.Image) -> int:
    """Return the orientation of EXIF or XMP; 1 where there is none that can be read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            told = image.getexif().get(ExifTags.Base.Orientation)
        except Exception:  # its readers trip over damage in many ways
            return 1
    return next((side for side in range(1, 9) if side == told), 1)


def _eight_bits(image: Image.Image) -> Image.Image:
    """Scale a grey of 16 bits to 8, its transparent value to an alpha channel; return others as they are."""
    if image.mode not in ("F", "I") and not image.mode.startswith("I;16"):
        return image
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):
        raise PixelError("its numbers have no depth; save it with 8 or 16 bits a channel")
    values = np.asarray(image)
    shown = Image.fromarray(np.rint(values.astype(np.float64) * (255 / _WHITE_16)).astype(np.uint8))
    if (clear := image.info.get("transparency")) is not None:
        shown.putalpha(Image.fromarray(np.where(values == clear, 0, 255).astype(np.uint8)))
    return shown


FP32_BYTES = 4
UNCUT = "pass the processor's whole output"


@dataclass(frozen=True, init=False)
class Video:
    """Frames of a video, of one size in order, which stand in a prompt as one picture; ``fps`` of them a second."""

    frames: tuple[Image.Image, ...]
    fps: float = 1.0

    def __init__(self, frames: Sequence[Image.Image], fps: float = 1.0) -> None:
        if not isinstance(fps, int | float) or isinstance(fps, bool) or not 0 < fps < math.inf:
            raise ValueError(f"fps={fps!r} of a video must be a number of frames a second above 0")
        if not (shown := tuple(to_rgb(frame, f"frame {i + 1} of a video") for i, frame in enumerate(frames))):
            raise ValueError("a video has no frames; give at least one")
        if len(sizes := dict.fromkeys(frame.size for frame in shown)) > 1:
            words = " and ".join(f"{width} x {height}" for width, height in list(sizes)[:2])
            raise ValueError(f"the frames of a video have different sizes, {words} pixels; scale them to one size")
        object.__setattr__(self, "frames", shown)
        object.__setattr__(self, "fps", float(fps))

    @property
    def size(self) -> tuple[int, int]:
        """Return (height, width) of a frame in pixels."""
        return self.frames[0].height, self.frames[0].width


Picture = Image.Image | Video  # media that ``<image>`` stands for in a prompt


def count_images(pictures: Sequence[Picture]) -> int:
    """Count a prompt's images, which families call ``together``; videos are shown as they are alone."""
    return sum(not isinstance(picture, Video) for picture in pictures)


def copied_bytes(pixel_bytes: int, element: int) -> int:
    """Return the bytes of a copy of fp32 pixels in a tower's dtype of ``element`` bytes; 0 if that is fp32 too."""
    return 0 if element == FP32_BYTES else pixel_bytes * element // FP32_BYTES


def tower_peak(pixel_bytes: int, element: int, side: int, live: int) -> int:
    """Return the bytes of fp32 pixels in a tower's dtype, and of ``live`` numbers for each of their square tiles."""
    return int(copied_bytes(pixel_bytes, element) + pixel_bytes // (FP32_BYTES * 3 * side**2) * element * live)


MOST_SIDE = 13_377  # pixels of a square's side: a larger one has more than Pillow opens


def check_square(height: int, width: int) -> None:
    """Raise ``ValueError`` if the square around a picture of these pixels would be too large to make."""
    if height != width and max(height, width) > MOST_SIDE:
        raise ValueError(f"a square around {width:,} x {height:,} pixels is larger than {MOST_SIDE:,} a side; crop it")


def pad_to_square(image: Image.Image, fill: tuple[int, int, int]) -> Image.Image:
    """Centre an RGB image on the smallest square, in a colour of 0..255 a channel; a square is returned."""
    width, height = image.size
    check_square(height, width)
    if (side := max(width, height)) == min(width, height):
        return image
    square = Image.new("RGB", (side, side), fill)
    square.paste(image, ((side - width) // 2, (side - height) // 2))
    return square


def mean_colour(image_processor: Any) -> tuple[int, int, int]:
    """Return the colour that an image processor's normalisation makes 0, 0..255 per channel."""
    red, green, blue = (round(255 * mean) for mean in image_processor.image_mean)
    return red, green, blue
