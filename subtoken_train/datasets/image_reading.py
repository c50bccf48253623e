"""One image, of a record or alone, decoded within bounds."""

from __future__ import annotations

import io
import warnings
from functools import cache
from pathlib import Path

from PIL import Image

from subtoken_train.datasets.image_sources import (
    EncodedImage,
    ImageSource,
    find_image,
)
from subtoken_train.documents import check_regular

MAX_PIXELS = 89_478_485
"""Width times height of the largest image that is opened unless a setting says more (Pillow's own first limit)."""
MOST_PIXELS = 2 * MAX_PIXELS
"""Pillow opens no larger one."""
_FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
"""Of Pillow's readers; that of EPS would call another program."""


def open_image(source: ImageSource, record_id: str | None = None, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Read one image, of a record or alone, as RGB; where a file is missing, one that ``find_image`` takes for it.

    Args:
        source: a file or encoded bytes.
        record_id: of the record that names it, for messages.
        max_pixels: width times height that is decoded at most.

    Raises:
        ValueError: the file is missing or no regular one, this is not a readable image, or it is too large.
    """
    of_record = "" if record_id is None else f"record {record_id[:80]!r}: "
    place = source.place if isinstance(source, EncodedImage) else source
    hint = "replace the file or drop the record" if of_record else "replace the file"
    try:
        if isinstance(source, EncodedImage):
            content: io.BytesIO | Path = io.BytesIO(source.read())
        else:
            content = find_image(source)
            check_regular(content)
        return _decoded(content, max_pixels)
    except FileNotFoundError:
        hint = "check image_folder, or fetch the images the data set lists" if of_record else "check the path"
        raise ValueError(f"{of_record}image {place} does not exist; {hint}") from None
    except Exception as error:  # Pillow's readers raise many kinds for broken files
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        words = " ".join(text.split())[:160] or type(error).__name__
        raise ValueError(f"{of_record}image {place} cannot be read ({words}); {hint}") from None


def _decoded(content: io.BytesIO | Path, max_pixels: int) -> Image.Image:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of size: our own limit is asked next; of damage that it can read past
        try:
            with Image.open(content, formats=_readers()) as image:
                width, height = image.size
                if width * height <= max_pixels:
                    return image.convert("RGB")
        except (OSError, SyntaxError, Image.DecompressionBombError):
            raise
        except Exception as error:  # numbers that are none, and whatever else its readers trip over
            raise ValueError("it is damaged") from error
    raise ValueError(f"it has {width:,} x {height:,} pixels, at most {max_pixels:,} are read")


@cache
def _readers() -> list[str]:
    Image.init()
    return [name for name in _FORMATS if name in Image.OPEN]
