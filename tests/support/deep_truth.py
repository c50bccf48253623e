"""What Qwen3-VL's first layers add to visual rows, from transformers' own tower and for its own decoder.

Legend: N rows of a sample, D model width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subtoken_train.families.family import Family
from subtoken_train.types import Batch
from tests.support.helpers import only_sample


@torch.no_grad()
def deep_rows(
    family: Family, prompts: Batch, sample: int, places_N: Tensor, joins_N: Tensor | None = None
) -> tuple[Tensor, list[Tensor]] | None:
    """Which rows, at places of a sample's prompt, are visual, and their features of each of the first layers.

    ``joins_N``: the place that each place of the prompt joined, whose features are the mean of those that did.
    """
    if not family.name.startswith("qwen3_vl") or not int(prompts.images_per_sample_B[sample]):
        return None
    alone, config = only_sample(prompts, sample), family.model.config
    made = family.model.model.visual(alone.pixel_values.to(family.model.dtype), grid_thw=alone.image_grid_I3)
    ids = alone.input_ids_BN[0]
    visual = (ids == config.image_token_id) | (ids == config.video_token_id)
    number, shown = visual.cumsum(0) - 1, visual[places_N]
    places = places_N[shown]
    who = [place[None] if joins_N is None else (joins_N == place).nonzero()[:, 0] for place in places]
    return shown, [
        torch.stack([features[number[joined]].mean(0) for joined in who]) for features in made.deepstack_features
    ]


def deep_inputs(deep: tuple[Tensor, list[Tensor]] | None, hidden_1ND: Tensor) -> dict[str, object]:
    """Of Qwen3-VL's decoder: no token after the rows is visual."""
    if deep is None:
        return {}
    shown, features = deep
    visual_1N = torch.zeros(hidden_1ND.shape[:2], dtype=torch.bool)
    visual_1N[0, : len(shown)] = shown
    return {"visual_pos_masks": visual_1N, "deepstack_visual_embeds": features}
