"""Tiles and frames of a batch, as its tensors hold them one after another, and as transformers' processors pad them.

Legend: B batch, N positions, I pictures, M tiles of the largest picture, T tiles of all pictures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def joined_tiles(padded_IM3HW: Tensor, tiles: Sequence[int]) -> Tensor:
    """Every picture's own tiles, [T, 3, H, W]: what pads pictures of fewer tiles is left out."""
    return torch.cat([own[:count] for own, count in zip(padded_IM3HW, tiles, strict=True)])


def padded_tiles(tiles_T3HW: Tensor, tiles: Sequence[int]) -> Tensor:
    """The inverse, [I, M, 3, H, W], zeros where a picture has fewer tiles."""
    return torch.nn.utils.rnn.pad_sequence(list(torch.split(tiles_T3HW, list(tiles))), batch_first=True)


def ordered_pictures(kind_BN: Tensor, tokens: Mapping[int, Sequence[int]]) -> list[list[tuple[int, int]]]:
    """Which pictures each sample has, in the order of its prompt: their kinds, and their numbers among that kind.

    Args:
        kind_BN: of what kind of picture each token is a placeholder, int64; 0 for text.
        tokens: visual tokens of every picture of a kind, in order.

    Raises:
        ValueError: the prompts' placeholders are not those of the pictures.
    """
    following = dict.fromkeys(tokens, 0)
    samples = []
    for row in kind_BN.tolist():
        shown, kinds, place = [], [kind for kind in row if kind], 0
        while place < len(kinds):
            kind = kinds[place]
            number, own = following[kind], tokens[kind]
            count = own[number] if number < len(own) else 0
            if not count or kinds[place : place + count] != [kind] * count:
                raise _other_pictures(kind_BN, tokens)
            shown.append((kind, number))
            following[kind], place = number + 1, place + count
        samples.append(shown)
    if any(following[kind] < len(own) for kind, own in tokens.items()):
        raise _other_pictures(kind_BN, tokens)
    return samples


def pictures_per_sample(tokens: Sequence[int], visual_BN: Tensor) -> Tensor:
    """How many pictures each sample has, int64 [B], where all are of one kind, see ``ordered_pictures``."""
    samples = ordered_pictures(visual_BN.long(), {1: tokens})
    return torch.tensor([len(shown) for shown in samples], device=visual_BN.device)


def _other_pictures(kind_BN: Tensor, tokens: Mapping[int, Sequence[int]]) -> ValueError:
    counts = [count for own in tokens.values() for count in own]
    return ValueError(
        f"pictures of {counts} visual tokens but prompts of {(kind_BN != 0).sum(-1).tolist()} placeholders; pass the "
        "processor's whole output, made with the same images"
    )
