"""Tiles and frames of a batch, as its tensors hold them one after another, and as transformers' processors pad them.

Legend: B batch, N positions, I pictures, M tiles of the largest picture, T tiles of all pictures.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def joined_tiles(padded_IM3HW: Tensor, tiles: Sequence[int]) -> Tensor:
    """Every picture's own tiles, [T, 3, H, W]: what pads pictures of fewer tiles is left out."""
    return torch.cat([own[:count] for own, count in zip(padded_IM3HW, tiles, strict=True)])


def padded_tiles(tiles_T3HW: Tensor, tiles: Sequence[int]) -> Tensor:
    """The inverse, [I, M, 3, H, W], zeros where a picture has fewer tiles."""
    return torch.nn.utils.rnn.pad_sequence(list(tiles_T3HW.split(list(tiles))), batch_first=True)


def pictures_per_sample(tokens: Sequence[int], visual_BN: Tensor) -> Tensor:
    """How many pictures each sample has, int64 [B].

    Args:
        tokens: visual tokens of every picture, in order.
        visual_BN: placeholders in the prompts, bool.

    Raises:
        ValueError: no division of the pictures gives every prompt as many tokens as it has placeholders.
    """
    counts, place = [], 0
    for placeholders in visual_BN.sum(-1).tolist():
        start, shown = place, 0
        while shown < placeholders and place < len(tokens):
            shown, place = shown + tokens[place], place + 1
        if shown != placeholders:
            break
        counts.append(place - start)
    if len(counts) < len(visual_BN) or place < len(tokens):
        raise ValueError(
            f"pictures of {list(tokens)} visual tokens but prompts of {visual_BN.sum(-1).tolist()} placeholders; pass "
            "the processor's whole output, made with the same images"
        )
    return torch.tensor(counts, device=visual_BN.device)
