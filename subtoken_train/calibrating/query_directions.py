"""Q-Filters' calibration: the direction of every head's queries over some prompts.

Legend: B batch, N rows, H query heads, h key-value heads, d head width.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from subtoken_train.calibrating.base import Calibrator, Progress, rounded
from subtoken_train.engine.attention import use_packed_attention
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.engine.prompt_pass import Rows
from subtoken_train.evictions.q_filter import HeadDirections, directions, query_moments
from subtoken_train.types import Batch


@dataclass(frozen=True)
class DirectionCalibrator(Calibrator):
    """All rows of all prompts count alike; see ``Calibrator`` for the settings."""

    name: ClassVar[str] = "q_filter"

    @torch.no_grad()
    def numbers(
        self, backbone: CompressedBackbone, batches: Iterable[Batch], show: Progress | None = None
    ) -> HeadDirections:
        use_packed_attention(backbone.family.decoder.config)
        grams: dict[int, Tensor] = {}
        sums: dict[int, Tensor] = {}

        def observe(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, rows: Rows) -> None:
            gram_BHdd, sum_BHd = query_moments(query, rows.visible_BM)
            grams[layer] = grams.get(layer, 0) + gram_BHdd.sum(0, keepdim=True)
            sums[layer] = sums.get(layer, 0) + sum_BHd.sum(0, keepdim=True)

        for batch in batches:
            backbone.run(batch, pad_left=True, observer=observe)
        heads = backbone.family.shape.num_kv_heads
        found = [directions(grams[layer], sums[layer], heads)[0].tolist() for layer in sorted(grams)]
        return HeadDirections(rounded(found))
