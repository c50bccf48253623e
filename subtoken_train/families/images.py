"""What a prompt shows, images and videos, and the geometry that training and inference share; PIL only."""

from __future__ import annotations

from dataclasses import dataclass

from PIL import Image

FP32_BYTES = 4


@dataclass(frozen=True)
class Video:
    """Frames of a video, which stand in a prompt as one picture does.

    Attributes:
        frames: RGB images of one size, in order.
        fps: frames a second, as they were taken from the video.
    """

    frames: tuple[Image.Image, ...]
    fps: float = 1.0


Picture = Image.Image | Video
"""What ``<image>`` stands for in a prompt."""


def copied_bytes(pixel_bytes: int, element: int) -> int:
    """What fp32 pixels take once more in a tower's dtype of ``element`` bytes; 0 where that is fp32 too."""
    return 0 if element == FP32_BYTES else pixel_bytes * element // FP32_BYTES


def pad_to_square(image: Image.Image, fill: tuple[int, int, int]) -> Image.Image:
    """Centre an RGB image on the smallest square that holds it, as LLaVA does before resizing.

    Args:
        image: RGB image of any size, in pixels.
        fill: colour of the bars, 0..255 per channel (LLaVA: the image processor's mean).

    Returns:
        The image itself when it is square already, else a new one. An odd bar is one pixel wider on the right/bottom.
    """
    width, height = image.size
    if width == height:
        return image
    side = max(width, height)
    square = Image.new("RGB", (side, side), fill)
    square.paste(image, ((side - width) // 2, (side - height) // 2))
    return square


def to_rgb(image: Image.Image, name: str) -> Image.Image:
    """An opened image as RGB; this is where its pixels are read.

    Raises:
        ValueError: it is no image of PIL's, or its pixels cannot be read; the message starts with ``name``.
    """
    if not isinstance(image, Image.Image):
        raise ValueError(f"{name} is no image; open it with PIL first")
    try:
        return image.convert("RGB")
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"{name} cannot be read ({error}); replace the file") from None
