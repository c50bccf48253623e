"""Images and videos as LLaVA-OneVision's processor makes them, and as a batch holds them.

The processor pads images to the largest one's tiles (``pixel_values``, [images, tiles, 3, side, side], with
``image_sizes``), says how many images each prompt with images has (``batch_num_images``; where it is missing each image
is its prompt's only one, as for transformers' model), and stacks videos of equal length (``pixel_values_videos``,
[videos, frames, 3, side, side]). A batch holds tiles and frames of all pictures one after another, in the order of the
prompts, and a row of ``image_grid_I3`` for each picture (see ``llava_onevision``).

Legend: B batch, N positions, I pictures, T tiles and frames of all pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from subtoken_train.families.family import GivenImages
from subtoken_train.families.llava.tiles import TileLayout, ordered_pictures, padded_tiles

IMAGE, VIDEO = 1, 2
Row = tuple[int, int, int]


def read_pictures(
    given: Mapping[str, Tensor], kind_BN: Tensor, layout: TileLayout, tokens: Callable[[Row], int]
) -> GivenImages:
    """Turn a processor's output into a batch's pictures.

    Args:
        given: the processor's output; some of the names may be missing.
        kind_BN: IMAGE and VIDEO at their placeholders, 0 elsewhere.
        layout: how images are cut.
        tokens: visual tokens of a picture, by its row.

    Raises:
        ValueError: a tensor has another form than the processor's, or the prompts have other placeholders.
    """
    images, image_rows = _images(given, layout)
    videos, video_rows = _videos(given, layout)
    pictures, rows = {IMAGE: images, VIDEO: videos}, {IMAGE: image_rows, VIDEO: video_rows}
    samples = ordered_pictures(kind_BN, {kind: [tokens(row) for row in own] for kind, own in rows.items()})
    order = [each for shown in samples for each in shown]
    counts_B = torch.tensor([len(shown) for shown in samples], device=kind_BN.device)
    if not order:
        return GivenImages(None, None, counts_B)
    grid_I3 = torch.tensor([rows[kind][number] for kind, number in order], device=kind_BN.device)
    return GivenImages(torch.cat([pictures[kind][number] for kind, number in order]), grid_I3, counts_B)


def written_pictures(pixels_T3HW: Tensor, grid_I3: Tensor) -> dict[str, Tensor]:
    """Return one prompt's pictures by the processor's names: the inverse of ``read_pictures``.

    Raises:
        ValueError: videos of unequal numbers of frames, which transformers' model does not take.
    """
    rows = grid_I3.tolist()
    shown = list(zip(torch.split(pixels_T3HW, [count for count, _, _ in rows]), rows, strict=True))
    images = [(own, row) for own, row in shown if row[1]]
    videos = [own for own, row in shown if not row[1]]
    made = {}
    if images:
        tiles = [len(own) for own, _ in images]
        made["pixel_values"] = padded_tiles(torch.cat([own for own, _ in images]), tiles)
        made["image_sizes"] = torch.tensor([row[1:] for _, row in images])
        made["batch_num_images"] = torch.tensor([len(images)])
    if videos:
        if len(lengths := {len(own) for own in videos}) > 1:
            raise ValueError(
                f"videos of {' and '.join(map(str, sorted(lengths)))} frames in one prompt; LLaVA-OneVision takes "
                "videos of equally many frames, so sample as many of each"
            )
        made["pixel_values_videos"] = torch.stack(videos)
    return made


def _images(given: Mapping[str, Tensor], layout: TileLayout) -> tuple[list[Tensor], list[Row]]:
    """Return every image's own tiles, and its row."""
    pixels, sizes, counts = (given.get(name) for name in ("pixel_values", "image_sizes", "batch_num_images"))
    if pixels is None and sizes is None:
        return [], []
    if pixels is not None and sizes is not None and pixels.dim() == 5 and _are_sizes(sizes):
        several = [False] * len(sizes)
        if counts is not None:
            several = [count != 1 for count in counts.tolist() for _ in range(count)]
        if len(pixels) == len(sizes) == len(several):
            tiles = [1 if among else layout.tiles(size) for size, among in zip(sizes.tolist(), several, strict=True)]
            if max(tiles) <= pixels.shape[1]:
                rows = [(count, height, width) for count, (height, width) in zip(tiles, sizes.tolist(), strict=True)]
                return [own[:count] for own, count in zip(pixels, tiles, strict=True)], rows
    raise ValueError(
        "pixel_values of llava_onevision must be [images, tiles, 3, height, width] with image_sizes [images, 2] and, "
        "for several images in a prompt, batch_num_images; pass the processor's whole output"
    )


def _are_sizes(sizes: Tensor) -> bool:
    """Return whether a tensor is [images, 2] of whole numbers above 0, of at least one image."""
    whole = sizes.dim() == 2 and sizes.shape[1] == 2 and len(sizes) > 0 and not sizes.is_floating_point()
    return whole and bool((sizes > 0).all())


def _videos(given: Mapping[str, Tensor], layout: TileLayout) -> tuple[list[Tensor], list[Row]]:
    """Return every video's frames, and its row."""
    pixels = given.get("pixel_values_videos")
    if pixels is None:
        return [], []
    if pixels.dim() != 5 or pixels.shape[2:] != (3, layout.side, layout.side) or not pixels.shape[1]:
        raise ValueError(
            f"pixel_values_videos of llava_onevision must be [videos, frames, 3, {layout.side}, {layout.side}]; pass "
            "the processor's whole output"
        )
    return list(pixels), [(pixels.shape[1], 0, 0)] * len(pixels)
