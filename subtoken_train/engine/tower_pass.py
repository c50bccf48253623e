"""The vision tower's reducer in a pass: fewer features per image, in the places of those that stay.

Legend: B batch, N positions before the reducer, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from subtoken_train.engine.prompt_pass import Rows, rows_read
from subtoken_train.families.family import Family
from subtoken_train.reducers.base import TowerReducer
from subtoken_train.types import Batch, Region, VisualStates


def tower_reduced(
    family: Family, reducer: TowerReducer, batch: Batch, rows: Rows, states: VisualStates
) -> tuple[Tensor, Tensor]:
    """Embeddings [B, N, D] with each image's features replaced by fewer ones, and the rows that stay, bool [B, N].

    Args:
        family: the backbone.
        reducer: merges what the tower saw.
        batch: the prompts.
        rows: of the whole batch.
        states: what the tower saw.

    Raises:
        ValueError: the batch has another number of visual tokens than its images have features.
    """
    keep, visual = rows.visible_BM.clone(), rows.regions_BM == Region.VISUAL
    sizes = [len(tokens) for tokens in states.tokens]
    tokens = visual.sum(-1).tolist()
    batch.check_features(sum(tokens), sum(sizes))
    states = replace(states, images_per_sample=images_of_samples(tokens, sizes))
    merged = reducer.merge(states, list(rows_read(batch)[visual].split_with_sizes(sizes)))
    keep[visual] = torch.cat(merged.slots)
    return family.place(batch, family.project(torch.cat(merged.tokens)), keep), keep


def images_of_samples(tokens: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Count the images of every sample.

    Args:
        tokens: visual tokens of each sample.
        sizes: those of each image of the batch, sample after sample; of a video a frame (or a layer of two) is one.
    """
    counts, image = [], 0
    for own in tokens:
        first, seen = image, 0
        while seen < own:
            seen, image = seen + sizes[image], image + 1
        assert seen == own
        counts.append(image - first)
    return counts
