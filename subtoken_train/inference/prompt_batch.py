"""From the inputs of ``generate``, which a processor returns, to a ``Batch`` with regions.

Legend: B batch, N positions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from subtoken_train.families.family import Family
from subtoken_train.functional.objective import IGNORE_INDEX
from subtoken_train.types import Batch, Region

IMAGE_INPUTS = ("pixel_values", "image_grid_thw", "mm_token_type_ids")
"""What processors make of images."""
QUERY_TOKENS = 64  # last prompt tokens of a text that ask, unless told


def batch_from_inputs(
    family: Family,
    input_ids_BN: Tensor,
    visible_BN: Tensor,
    inputs: Mapping[str, Any],
    context_length: int | None,
) -> Batch:
    """Mark the regions of prompts, padded on either side.

    A model that sees images: SYSTEM before a sample's first image token, VISUAL, QUERY for everything else; the ranking
    token is the last one. A language model: CONTEXT and QUERY, see ``context_tokens``.

    Args:
        family: the backbone.
        input_ids_BN: token ids, one image token per visual token.
        visible_BN: real tokens, bool.
        inputs: the processor's further outputs, by the names ``IMAGE_INPUTS``.
        context_length: tokens of a language model's context, of every sample; None: the default split.

    Raises:
        ValueError: image tokens without pixels, pixels for a text model, or a context as long as a prompt.

    What is returned lies on the model's device.
    """
    device = family.model.device
    input_ids_BN, visible = input_ids_BN.to(device).long(), visible_BN.to(device)
    pixels, grid, kinds = (_on(device, name, inputs.get(name)) for name in IMAGE_INPUTS)
    if kinds is not None and not torch.equal(kinds.ne(0), input_ids_BN.eq(_image_token(family))):
        raise ValueError(
            "mm_token_type_ids do not mark the image tokens of input_ids; pass the processor's whole output"
        )
    places = torch.arange(input_ids_BN.shape[1], device=input_ids_BN.device)
    last_B = torch.where(visible, places, -1).amax(-1)
    if family.image_token_id is None:
        if context_length is not None and type(context_length) is not int:
            raise ValueError(f"context_length={context_length!r} must be a whole number of tokens")
        if pixels is not None:
            raise ValueError(f"pixel_values were given, but {family.name} sees no images")
        regions, images = _text_regions(family, input_ids_BN, visible, context_length), torch.zeros_like(last_B)
        rank = last_B
    else:
        if context_length is not None:
            raise ValueError(f"context_length is for language models; {family.name} compresses the visual tokens")
        visual = visible & (input_ids_BN == family.image_token_id)
        if bool(visual.any()) != (pixels is not None):
            found = int(visual.sum())
            raise ValueError(
                f"{found} image tokens in the prompt but {'no' if pixels is None else 'some'} pixel_values; write one "
                "image placeholder per image and pass the processor's whole output"
            )
        _check_images(family, pixels, grid)
        regions = torch.where(visual, int(Region.VISUAL), int(Region.QUERY))
        before = (visual.long().cumsum(-1) == 0) & visual.any(-1, keepdim=True)
        regions = regions.masked_fill(before, int(Region.SYSTEM)).masked_fill(~visible, int(Region.PADDING))
        images = _images_per_sample(family, visual, grid)
        rank = torch.where(visual.any(-1), last_B, -1)
    return Batch(
        input_ids_BN=input_ids_BN,
        labels_BN=torch.full_like(input_ids_BN, IGNORE_INDEX),
        regions_BN=regions,
        rank_position_B=rank,
        pixel_values=pixels,
        images_per_sample_B=images,
        record_ids=[f"prompt {i}" for i in range(len(input_ids_BN))],
        image_grid_I3=grid,
    )


def _image_token(family: Family) -> int:
    """No token's id for a language model."""
    return -1 if family.image_token_id is None else family.image_token_id


def _check_images(family: Family, pixels: Tensor | None, grid: Tensor | None) -> None:
    """Raise a worded ``ValueError`` unless the pixels have the form that the family's processor gives them."""
    if family.nominal_image is None:
        if grid is not None:
            raise ValueError(f"image_grid_thw: {family.name} scales every image to one size; leave it out")
        wanted = "[images, 3, height, width]" if pixels is not None and pixels.dim() != 4 else None
    elif pixels is None and grid is None:
        return
    else:
        patches = -1
        if grid is not None and grid.dim() == 2 and grid.shape[1] == 3 and not grid.is_floating_point():
            patches = int(grid.prod(-1).sum())
        fits = pixels is not None and pixels.dim() == 2 and len(pixels) == patches
        wanted = None if fits else "[patches, channels] with image_grid_thw [images, 3] that counts the patches"
    if wanted is not None:
        raise ValueError(f"pixel_values of {family.name} must be {wanted}; pass the processor's whole output")


def _on(device: torch.device, name: str, given: Any) -> Tensor | None:
    """An input that is a tensor, on the model's device."""
    if given is not None and not isinstance(given, Tensor):
        raise ValueError(f'{name} must be a tensor, not {type(given).__name__}; use return_tensors="pt"')
    return None if given is None else given.to(device)


def context_tokens(family: Family, token_ids: list[int]) -> int:
    """Tokens of a text that are context: up to its last blank line (a few-shot prompt), else all but the last 64.

    A blank line counts where something follows it, in at most half of the prompt; a prompt of 64 tokens or fewer
    without one has no context, and is not compressed.
    """

    def text(start: int) -> str:
        ending: str = family.tokenizer.decode(token_ids[start - 1 :])
        return ending

    starts = range(len(token_ids) // 2 + 1, len(token_ids))
    # the later the start the shorter the ending: the last one that still holds a blank line is found by halving
    place = bisect_left(starts, True, key=lambda start: "\n\n" not in text(start))
    if place and text(starts[place - 1]).split("\n\n")[-1].strip():
        return starts[place - 1]
    return max(0, len(token_ids) - QUERY_TOKENS)


def _text_regions(family: Family, ids_BN: Tensor, visible_BN: Tensor, context_length: int | None) -> Tensor:
    """CONTEXT, then QUERY of each sample."""
    regions = torch.full_like(ids_BN, int(Region.PADDING))
    for row, (ids, visible) in enumerate(zip(ids_BN, visible_BN, strict=True)):
        real = ids[visible].tolist()
        length = context_tokens(family, real) if context_length is None else context_length
        if not 0 <= length < len(real):
            raise ValueError(
                f"context_length={length} must lie between 0 and {len(real) - 1}: prompt {row} has {len(real)} tokens, "
                "and at least one of them must ask"
            )
        split = [int(Region.CONTEXT)] * length + [int(Region.QUERY)] * (len(real) - length)
        regions[row, visible] = torch.tensor(split, device=regions.device)
    return regions


def _images_per_sample(family: Family, visual_BN: Tensor, grid: Tensor | None) -> Tensor:
    """Images of each sample: runs of image tokens where images keep their size, else tokens over tokens per image."""
    if grid is None:
        return visual_BN.sum(-1) // family.visual_tokens()
    runs = [sum(image for image, _ in groupby(row)) for row in visual_BN.tolist()]
    return torch.tensor(runs, device=visual_BN.device)
