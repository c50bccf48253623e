"""What a prompt shows, images and videos, and the geometry that training and inference share; PIL only.

Legend: F frames.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from subtoken_train.families.rgb import to_rgb

FP32_BYTES = 4


@dataclass(frozen=True, init=False)
class Video:
    """Frames of a video, which stand in a prompt as one picture does. No file of a video is decoded here.

    Args:
        frames: images of one size in order, or a uint8 tensor [F, 3, height, width].
        fps: frames a second, as they were taken from the video.

    Attributes:
        frames: the same as RGB images.
        fps: the same.

    Raises:
        ValueError: there is no frame, frames have several sizes, one is no image, or ``fps`` is no positive number.
    """

    frames: tuple[Image.Image, ...]
    fps: float = 1.0

    def __init__(self, frames: Sequence[Image.Image] | Tensor, fps: float = 1.0) -> None:
        if not isinstance(fps, int | float) or isinstance(fps, bool) or not 0 < fps < math.inf:
            raise ValueError(f"fps={fps!r} of a video must be a number of frames a second above 0")
        given = _tensor_frames(frames) if isinstance(frames, Tensor) else frames
        shown = tuple(to_rgb(frame, f"frame {i + 1} of a video") for i, frame in enumerate(given))
        if not shown:
            raise ValueError("a video has no frame; give at least one")
        if len(sizes := dict.fromkeys(frame.size for frame in shown)) > 1:
            words = " and ".join(f"{width} x {height}" for width, height in list(sizes)[:2])
            raise ValueError(f"the frames of a video have several sizes, {words} pixels; scale them to one")
        object.__setattr__(self, "frames", shown)
        object.__setattr__(self, "fps", float(fps))

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of a frame in pixels."""
        return self.frames[0].height, self.frames[0].width


Picture = Image.Image | Video
"""What ``<image>`` stands for in a prompt."""


def count_images(pictures: Sequence[Picture]) -> int:
    """Images among the pictures of a prompt: what families call ``together``. Videos are shown as they are alone."""
    return sum(not isinstance(picture, Video) for picture in pictures)


def copied_bytes(pixel_bytes: int, element: int) -> int:
    """What fp32 pixels take once more in a tower's dtype of ``element`` bytes; 0 where that is fp32 too."""
    return 0 if element == FP32_BYTES else pixel_bytes * element // FP32_BYTES


MOST_SIDE = 13_377
"""Longer side, in pixels, of a picture that is padded to a square: a larger square has more than Pillow opens."""


def check_square(height: int, width: int) -> None:
    """Raise a worded ``ValueError`` where the square around a picture of these pixels would be too large to make."""
    if height != width and max(height, width) > MOST_SIDE:
        raise ValueError(
            f"an image of {width:,} x {height:,} pixels is padded to a square, whose side may have at most "
            f"{MOST_SIDE:,} pixels; crop it, scale it down or drop the record"
        )


def pad_to_square(image: Image.Image, fill: tuple[int, int, int]) -> Image.Image:
    """Centre an RGB image on the smallest square that holds it, as LLaVA does before resizing.

    Args:
        image: RGB image of any size, in pixels.
        fill: colour of the bars, 0..255 per channel (LLaVA: the image processor's mean).

    Returns:
        The image itself when it is square already, else a new one. An odd bar is one pixel wider on the right/bottom.

    Raises:
        ValueError: see ``check_square``.
    """
    width, height = image.size
    check_square(height, width)
    if width == height:
        return image
    side = max(width, height)
    square = Image.new("RGB", (side, side), fill)
    square.paste(image, ((side - width) // 2, (side - height) // 2))
    return square


def mean_colour(image_processor: Any) -> tuple[int, int, int]:
    """Return the colour that an image processor's normalisation makes 0, 0..255 per channel."""
    red, green, blue = (round(255 * mean) for mean in image_processor.image_mean)
    return red, green, blue


def _tensor_frames(frames_F3HW: Tensor) -> list[Image.Image]:
    if frames_F3HW.dim() != 4 or frames_F3HW.shape[1] != 3 or frames_F3HW.dtype != torch.uint8:
        shape = list(frames_F3HW.shape)
        raise ValueError(f"frames of {frames_F3HW.dtype} {shape}; a uint8 tensor [frames, 3, height, width] is needed")
    if 0 in frames_F3HW.shape:
        raise ValueError(f"frames of shape {list(frames_F3HW.shape)} hold no pixel")
    return [Image.fromarray(frame.permute(1, 2, 0).contiguous().cpu().numpy()) for frame in frames_F3HW]
