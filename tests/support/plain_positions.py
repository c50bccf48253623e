"""Position ids of a prompt, counted token by token, and the window that a configuration gives a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from subtoken_train.families.family import Family
from subtoken_train.types import Batch, Region


def prompt_positions(family: Family, prompts: Batch, sample: int) -> Tensor:
    """Positions of a sample's real tokens, [n], or [3, n]: an image's tokens are a grid, what follows is beyond it."""
    ids = prompts.input_ids_BN[sample, prompts.regions_BN[sample] != Region.PADDING].tolist()
    if family.tower_positions != "mrope":
        return torch.arange(len(ids))
    first = int(prompts.images_per_sample_B[:sample].sum())
    grids = [] if prompts.image_grid_I3 is None else prompts.image_grid_I3[first:].tolist()
    placed: list[tuple[int, int, int]] = []
    start = 0
    while len(placed) < len(ids):
        if ids[len(placed)] != family.image_token_id:
            placed.append((start, start, start))
            start += 1
            continue
        _, high, wide = (n // 2 for n in grids.pop(0))
        placed += [(start, start + row, start + column) for row in range(high) for column in range(wide)]
        start += max(high, wide)
    return torch.tensor(placed).T


def plain_window(config, layer: int) -> int | None:
    """Positions that a row of the layer sees, its own included; None: all before it."""
    kinds = getattr(config, "layer_types", None)
    slides = config.model_type == "mistral" or (kinds and kinds[layer] == "sliding_attention")
    return config.sliding_window if slides else None
