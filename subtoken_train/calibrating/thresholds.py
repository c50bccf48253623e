"""The threshold that meets a mean budget: found on whole prompts, and recorded with what it keeps of them.

What a threshold keeps of each prompt is known from the scores of all of its entries, so that the lowest one whose mean
is within the budget is read off them. Prompts under an adapter are scored under its reducer and routers.

Legend: B batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from subtoken_train.cache.cache import PackedCache
from subtoken_train.calibrating.base import Batches, Calibrator, Progress, rounded
from subtoken_train.engine.attention import reading_packed
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.errors import MAX_COUNT
from subtoken_train.evictions import build_eviction
from subtoken_train.evictions.base import Eviction
from subtoken_train.evictions.thresholds import WINDOW, ScoredPrompt, ThresholdRecord, mean_threshold, scale_of
from subtoken_train.inference.compression import Compression, method_record, parse_settings
from subtoken_train.inference.eviction_pass import EvictionPass
from subtoken_train.inference.layer_packer import LayerPacker
from subtoken_train.inference.prefill import check_context_first, contexts_of, run_whole
from subtoken_train.ledger.kv_budget import mean_deviation
from subtoken_train.types import Batch, Protocol
from subtoken_train.view.method import setting
from subtoken_train.view.view import Scope


@dataclass(frozen=True)
class ThresholdCalibrator(Calibrator):
    """The threshold of one method for one mean budget; see ``Calibrator`` for the other settings.

    Attributes:
        eviction: the method, which must have absolute scores.
        eviction_options: its settings, ``KEY=VALUE`` with commas between them.
        keep: share of the entries in scope that stays, mean over the prompts.
        window: last positions that stay whatever they score.
        scope: what competes, see ``Compression``.
        protocol: ``query_aware``, or ``context_first``: contexts are scored before their questions are seen.
    """

    name: ClassVar[str] = "threshold"

    samples: int = setting(16, 1, MAX_COUNT)
    eviction: str = "kvzip"
    eviction_options: str = ""
    keep: float = 0.5
    window: int = setting(WINDOW)
    scope: Scope = "context"
    protocol: Protocol = "query_aware"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.keep < 1:
            raise ValueError(f"threshold keep={self.keep:g} must lie between 0 and 1; 0.25 keeps a quarter on average")
        scale_of(self._method())

    def check(self, backbone: CompressedBackbone) -> None:
        compression = self._compression()
        compression.check(backbone.family)
        if self.protocol == "context_first":
            check_context_first(backbone, compression)

    @torch.no_grad()
    def numbers(self, backbone: CompressedBackbone, batches: Batches, show: Progress | None = None) -> ThresholdRecord:
        with reading_packed(backbone.family.decoder.config):
            prompts = [each for batch in batches for each in self._scored(backbone, batch)]
        if not prompts:
            raise ValueError(f"none of the prompts has anything in scope {self.scope!r}; choose other data")
        found = mean_threshold(prompts, self.keep)
        mean, deviation = mean_deviation([each.share(found) for each in prompts])
        return ThresholdRecord(found, self.window, method_record(self._method()), rounded(mean), rounded(deviation))

    def _method(self) -> Eviction:
        options = [each.strip() for each in self.eviction_options.split(",") if each.strip()]
        return build_eviction(self.eviction, **parse_settings(self.eviction, options))

    def _compression(self) -> Compression:
        return Compression(self._method(), scope=self.scope)

    def _scored(self, backbone: CompressedBackbone, batch: Batch) -> list[ScoredPrompt]:
        compression, family = self._compression(), backbone.family
        compression.check_prompts(batch)
        prompts = contexts_of(batch) if self.protocol == "context_first" else batch
        eviction = EvictionPass(compression, family, prompts, backbone.reducer, backbone.group_budget)
        cache, length = PackedCache(family.shape.num_layers), prompts.input_ids_BN.shape[1]
        run_whole(backbone, prompts, eviction, LayerPacker(backbone, compression, cache, length))
        return eviction.scored_prompts(self.window)
