"""Calibrations read off the prompts' own pass: PrefixKV's layer shares and Q-Filters' directions.

Legend: B batch, M rows of a layer, N rows, H query heads, h key-value heads, d head width, L layers, R budgets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from subtoken_train.calibrating.base import Batches, Calibrator, Progress, rounded
from subtoken_train.engine.attention import use_packed_attention
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.engine.prompt_pass import Rows
from subtoken_train.evictions.elastic import LayerShares, PrefixKV
from subtoken_train.evictions.q_filter import HeadDirections, directions, query_moments
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.eviction_pass import EvictionPass
from subtoken_train.types import Batch
from subtoken_train.view.view import Scope

KEEP = [round(tenth / 10, 1) for tenth in range(1, 10)]


@dataclass(frozen=True)
class PrefixCalibrator(Calibrator):
    """Prefixes of every prompt, averaged; see ``Calibrator`` and ``PrefixKV`` for the settings.

    Source: "PrefixKV", section 3, and the release's profiles: 10 prompts, the budgets 0.1 to 0.9.
    """

    name: ClassVar[str] = "prefixkv"

    scope: Scope = "context"
    sinks: int = 1
    recent: int = 1

    def check(self, backbone: CompressedBackbone) -> None:
        self._compression(0.5).check(backbone.family)

    @torch.no_grad()
    def numbers(self, backbone: CompressedBackbone, batches: Batches, show: Progress | None = None) -> LayerShares:
        use_packed_attention(backbone.family.decoder.config)
        found = [shares_BRL for batch in batches for shares_BRL in self._shares(backbone, batch)]
        if not found:
            raise ValueError(f"none of the prompts has anything in scope {self.scope!r}; choose other data")
        return LayerShares(KEEP, rounded(torch.stack(found).mean(0).tolist()))

    def _compression(self, keep: float) -> Compression:
        return Compression(PrefixKV(sinks=self.sinks, recent=self.recent), keep, scope=self.scope)

    def _shares(self, backbone: CompressedBackbone, batch: Batch) -> list[Tensor]:
        """Shares of every sample that has something in scope, float64 [R, L] each."""
        groups = backbone.group_budget
        passes = [EvictionPass(self._compression(keep), backbone.family, batch, groups=groups) for keep in KEEP]
        backbone.run(batch, pad_left=True, observer=passes[0].observe)
        rows = []
        for each in passes:
            each.scores, each.rows = passes[0].scores, passes[0].rows
            scopes = [each.compression.in_scope(each.rows[layer].regions_BM) for layer in sorted(each.rows)]
            kept = zip(each.keep(), scopes, strict=True)
            rows.append(torch.stack([(keep_BhM[:, 0] & scope_BM).sum(-1) for keep_BhM, scope_BM in kept], -1))
        total_BL = torch.stack([scope_BM.sum(-1) for scope_BM in scopes], -1)
        shares_BRL = torch.stack(rows, 1).double().cpu() / total_BL[:, None].cpu().clamp(min=1)
        return [shares_RL for shares_RL, total_L in zip(shares_BRL, total_BL, strict=True) if bool(total_L.all())]


@dataclass(frozen=True)
class DirectionCalibrator(Calibrator):
    """The direction of every head's queries; all rows of all prompts count alike."""

    name: ClassVar[str] = "q_filter"

    @torch.no_grad()
    def numbers(self, backbone: CompressedBackbone, batches: Batches, show: Progress | None = None) -> HeadDirections:
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
