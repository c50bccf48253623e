"""Position ids of a prompt, counted token by token, and the window that a configuration gives a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from subtoken_train.families.family import Family
from subtoken_train.types import Batch, Region


def prompt_positions(family: Family, prompts: Batch, sample: int) -> Tensor:
    """Positions of a sample's real tokens, [n], or [3, n]: a picture's tokens are a grid, what follows is beyond it.

    A video's layers lie behind one another in time, for Qwen2.5-VL by its seconds (two steps each); for Qwen3-VL each
    is a picture of its own behind text.
    """
    ids = prompts.input_ids_BN[sample, prompts.regions_BN[sample] != Region.PADDING].tolist()
    if family.tower_positions != "mrope":
        return torch.arange(len(ids))
    first = int(prompts.images_per_sample_B[:sample].sum())
    grids = [] if prompts.image_grid_I3 is None else prompts.image_grid_I3[first:].tolist()
    seconds = [0.5] * len(grids) if prompts.seconds_I is None else prompts.seconds_I[first:].tolist()
    shown = [(*grid, int(2 * second)) for grid, second in zip(grids, seconds, strict=True)]
    if family.name.startswith(("qwen3_vl", "glm4v")):
        shown = [(1, high, wide, 1) for layers, high, wide, _ in shown for _ in range(layers)]
    visual = (family.model.config.image_token_id, family.model.config.video_token_id)
    placed: list[tuple[int, int, int]] = []
    start = 0
    while len(placed) < len(ids):
        if ids[len(placed)] not in visual:
            placed.append((start, start, start))
            start += 1
            continue
        layers, high, wide, step = shown.pop(0)
        cells = [(row, column) for row in range(high // 2) for column in range(wide // 2)]
        placed += [(start + step * t, start + row, start + column) for t in range(layers) for row, column in cells]
        start += max(high, wide) // 2
    return torch.tensor(placed).T


def plain_window(config, layer: int) -> int | None:
    """Positions that a row of the layer sees, its own included; None: all before it."""
    kinds = getattr(config, "layer_types", None)
    slides = not kinds or config.model_type == "mistral" or kinds[layer] == "sliding_attention"
    return getattr(config, "sliding_window", None) if slides else None


SIDE_BY_SIDE = ("cohere", "glm4")
"""Models whose channels turn in pairs 0 and 1, 2 and 3, ...; in others the first half goes with the second."""


def moved_keys(key: Tensor, entries_hN: Tensor, position_N: Tensor, frequencies: Tensor, model_type: str) -> Tensor:
    """Keys [1, h, n, d] whose kept entries are turned on from their own places to 0, 1, 2, ..., head by head."""
    moved, pairs = key.clone(), len(frequencies)
    one, other = slice(0, pairs), slice(pairs, 2 * pairs)
    if model_type in SIDE_BY_SIDE:
        one, other = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    for head, kept_N in enumerate(entries_hN):
        own = kept_N.nonzero()[:, 0]
        angle = (torch.arange(len(own)) - position_N[own])[:, None] * frequencies
        first, second = key[0, head, own, one], key[0, head, own, other]
        moved[0, head, own, one] = first * angle.cos() - second * angle.sin()
        moved[0, head, own, other] = second * angle.cos() + first * angle.sin()
    return moved
