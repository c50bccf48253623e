"""Calibration of TriAttention: where the queries of every head lie before their rotary embedding.

Legend: H query heads, M rows of a layer, d head width.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from subtoken_train.calibrating.base import Batches, Calibrator, rounded
from subtoken_train.engine.attention import use_packed_attention
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.engine.prompt_pass import Rows
from subtoken_train.evictions.answers import QueryCentres, pair_lengths
from subtoken_train.families.positions import rotary_kind


@dataclass(frozen=True)
class CentreCalibrator(Calibrator):
    """Means over all rows of all prompts; see ``QueryCentres``."""

    name: ClassVar[str] = "triattention"
    any_text: ClassVar[bool] = True

    def check(self, backbone: CompressedBackbone) -> None:
        family = backbone.family
        if family.length_dependent:
            kind = rotary_kind(family.decoder.rotary_emb)
            words = f"{kind!r} positions, whose frequencies change with the length; use snapkv or rkv"
            raise ValueError(f"triattention cannot foretell attention under {words}")

    @torch.no_grad()
    def numbers(self, backbone: CompressedBackbone, batches: Batches) -> QueryCentres:
        use_packed_attention(backbone.family.decoder.config)
        sums: dict[int, list[Tensor]] = {}
        rows_seen: dict[int, int] = {}

        def observe(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, rows: Rows) -> None:
            rotation = backbone.family.rotation(layer, rows.position)
            query_BHMd = rotation.turn_back(query)
            marks_B1M1 = rows.visible_BM[:, None, :, None]
            both = query_BHMd, pair_lengths(query_BHMd, rotation)
            found = [(each.double() * marks_B1M1).sum((0, 2)).cpu() for each in both]
            sums[layer] = [a + b for a, b in zip(sums[layer], found, strict=True)] if layer in sums else found
            rows_seen[layer] = rows_seen.get(layer, 0) + int(rows.visible_BM.sum())

        for batch in batches:
            backbone.run(batch, pad_left=True, observer=observe)
        tables = ([(sums[layer][i] / rows_seen[layer]).tolist() for layer in sorted(sums)] for i in range(2))
        return QueryCentres(*map(rounded, tables))
