"""Patches of a video, and which runs of placeholders stand for which picture, as Qwen's VLMs have them.

Legend: B batch, N positions, I images, V videos, F frames, P patches of a frame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from subtoken_train.families.images import Video

IMAGE, VIDEO = 1, 2
"""Values of ``mm_token_type_ids``."""
Runs = list[list[tuple[int, int]]]
"""Of each prompt, (kind, length) of its runs of placeholders in order."""


def video_patches(processor: Any, video: Video, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Flattened patches [layers * P, channels * pixels] of a video's frames, and its grid [1, 3].

    Args:
        processor: a PIL image processor of Qwen's, which repeats a frame to fill a patch's time.
        video: its last frame stands again where frames are too few to fill a layer.
        size: (height, width) in pixels that frames are scaled to, in whole visual tokens.
    """
    depth, side = int(processor.temporal_patch_size), int(processor.patch_size)
    frames = [frame.resize(size[::-1], Image.Resampling(processor.resample)) for frame in video.frames]
    made = processor(frames, do_resize=False, return_tensors="pt")
    patches: Tensor = made["pixel_values"]
    alone_FPCx = patches.reshape(len(frames), len(patches) // len(frames), -1, depth, side * side)[:, :, :, 0]
    missing = -len(frames) % depth
    whole = torch.cat([alone_FPCx, alone_FPCx[-1:].expand(missing, -1, -1, -1)])
    # layer, patch, channel, frame of the layer, pixel
    layers = whole.reshape(-1, depth, *whole.shape[1:]).permute(0, 2, 3, 1, 4)
    _, height, width = made["image_grid_thw"][0].tolist()
    return layers.flatten(2).flatten(0, 1), torch.tensor([[len(layers), height, width]])


def runs_of(kinds_BN: Tensor) -> Runs:
    """The runs of placeholders of each prompt; 0 is text."""
    return [[(kind, len(list(run))) for kind, run in groupby(row) if kind] for row in kinds_BN.tolist()]


class Grids:
    """Grids of a batch's pictures in order: of all together, or of images and videos by themselves.

    Args:
        grid_I3: of all pictures, or of the images.
        grid_V3: of the videos, where they are by themselves.
    """

    def __init__(self, grid_I3: Tensor | None, grid_V3: Tensor | None = None) -> None:
        self.all = [grid.tolist() for grids in (grid_I3, grid_V3) if grids is not None for grid in grids]
        images: Iterator[list[int]] = iter([] if grid_I3 is None else grid_I3.tolist())
        self._left = {IMAGE: images, VIDEO: images if grid_V3 is None else iter(grid_V3.tolist())}

    def next(self, kind: int) -> list[int] | None:
        """The next picture's, of a kind; None where there is none."""
        return next(self._left[kind], None)

    @property
    def empty(self) -> bool:
        """Whether all were taken; it takes the next ones."""
        return all(self.next(kind) is None for kind in (IMAGE, VIDEO))


def pictures_in(
    runs: Runs, grids: Grids, runs_for: Callable[[int, list[int]], list[int]], names: list[str]
) -> tuple[list[int], list[int]]:
    """Which pictures stand in some prompts.

    Args:
        runs: of each prompt.
        grids: of the pictures.
        runs_for: lengths of the runs that stand for a picture of a kind and grid.
        names: of the prompts, for messages.

    Returns:
        (kind of every picture in order, pictures of each prompt).

    Raises:
        ValueError: the runs are not those of the pictures.
    """
    kinds, counts, fit = [], [], True
    for prompt in runs:
        left, count = list(prompt), 0
        while left and fit:
            kind = left[0][0]
            grid = grids.next(kind)
            wanted = [] if grid is None else [(kind, length) for length in runs_for(kind, grid)]
            fit = bool(wanted) and left[: len(wanted)] == wanted
            left, count = left[len(wanted) :], count + 1
            kinds.append(kind)
        counts.append(count)
    if fit and grids.empty:
        return kinds, counts
    sizes = [sum(runs_for(IMAGE, grid)) for grid in grids.all]
    lengths = [length for prompt in runs for _, length in prompt]
    raise ValueError(
        f"images of {sizes} visual tokens but runs of {lengths} image tokens in the batch of records {', '.join(names)}"
    )


def check_pixels(
    name: str, given: Mapping[str, Tensor], pixels_name: str, grid_name: str
) -> tuple[Tensor | None, Tensor | None]:
    """Patches and grids of a processor's output, by their names, for a family.

    Raises:
        ValueError: one is missing, or the grids do not count the patches.
    """
    pixels, grid = given.get(pixels_name), given.get(grid_name)
    if pixels is None and grid is None:
        return None, None
    patches = -1
    if grid is not None and grid.dim() == 2 and grid.shape[1] == 3 and not grid.is_floating_point():
        patches = int(grid.prod(-1).sum())
    if pixels is None or pixels.dim() != 2 or len(pixels) != patches:
        raise ValueError(
            f"{pixels_name} of {name} must be [patches, channels] with {grid_name} [images, 3] that counts the "
            "patches; pass the processor's whole output"
        )
    return pixels, grid


def split_by_kind(pixels: Tensor | None, grid_I3: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    """(patches, grid [3]) of each picture; none where there are no pixels."""
    if pixels is None or grid_I3 is None:
        return []
    return list(zip(torch.split(pixels, grid_I3.prod(-1).tolist()), grid_I3, strict=True))
