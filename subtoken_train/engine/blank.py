"""A stand-in for the images of a text-only batch, where processes gather a module's weights as it is called."""

from __future__ import annotations

import torch
from PIL import Image

from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.reducers.base import TowerReducer
from subtoken_train.types import Batch

BLANK_SIZE = (64, 64)


@torch.no_grad()
def see_blank_image(parts: CompressedBackbone, batch: Batch) -> None:
    """Run the vision tower on a black image and drop the result, if a batch has no image of its own.

    Called before ``parts.run``, it makes a text-only batch call the modules that one with images calls, in the same
    order: the tower (as the token reducer reads it) and the projector come before the embeddings, and the layers after
    them are the same either way. Nothing for a family without images.
    """
    family, reducer = parts.family, parts.reducer
    if batch.pixel_values is not None or family.image_token_id is None:
        return
    device = batch.input_ids_BN.device
    pixels, grid = family.process_images([Image.new("RGB", BLANK_SIZE)])
    nothing_BN = torch.zeros(1, 0, dtype=torch.long, device=device)
    blank = Batch(
        input_ids_BN=nothing_BN,
        labels_BN=nothing_BN,
        regions_BN=nothing_BN,
        rank_position_B=torch.tensor([-1], device=device),
        pixel_values=pixels.to(device),
        images_per_sample_B=torch.ones(1, dtype=torch.long, device=device),
        record_ids=["blank"],
        image_grid_I3=None if grid is None else grid.to(device),
    )
    reads_tower = isinstance(reducer, TowerReducer) and reducer.keep_ratio < 1
    states = family.visual_states(blank, statistics=reads_tower)
    assert states is not None
    family.project(torch.cat(states.tokens))
