"""Calibrations of layers, read off prompts: PrefixKV, Q-Filters, TriAttention, FitPrune, KVzap, and thresholds.

Legend: B batch, M rows of a layer, N rows, H query heads, h key-value heads, d head width, L layers, R budgets, P
prompts, n entries, D model width.
"""

from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from subtoken_train.calibrating.base import Batches, Calibrator, named_method, rounded, scored_prompts
from subtoken_train.engine.attention import reading_packed, use_packed_attention
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.engine.prompt_pass import Rows
from subtoken_train.errors import MAX_COUNT, refuse
from subtoken_train.evictions.h2o import LayerShares, PrefixKV
from subtoken_train.evictions.queries import HeadDirections, QueryCentres, directions, pair_lengths, query_moments
from subtoken_train.evictions.thresholds import WINDOW, ThresholdRecord, mean_threshold, scale_of
from subtoken_train.families.positions import rotary_kind
from subtoken_train.inference.compression import Compression, method_record
from subtoken_train.inference.eviction_pass import EvictionPass
from subtoken_train.inference.prefill import check_context_first, contexts_of
from subtoken_train.ledger.kv_budget import mean_deviation
from subtoken_train.reducers.base import Cut, Stage
from subtoken_train.reducers.staged import DecoderReducer, PruneSchedules, attention_masses
from subtoken_train.types import Batch, Protocol, Region
from subtoken_train.view.method import setting
from subtoken_train.view.view import Scope, View

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
    def numbers(self, backbone: CompressedBackbone, batches: Batches) -> LayerShares:
        use_packed_attention(backbone.family.decoder.config)
        groups, found = backbone.group_budget, list[Tensor]()
        for batch in batches:
            passes = [EvictionPass(self._compression(keep), backbone.family, batch, groups=groups) for keep in KEEP]
            backbone.run(batch, pad_left=True, observer=passes[0].observe)
            rows = []
            for each in passes:
                each.scores, each.rows = passes[0].scores, passes[0].rows
                scopes = [each.compression.in_scope(each.rows[layer].regions_BM) for layer in sorted(each.rows)]
                kept = zip(each.keep(), scopes, strict=True)
                rows.append(torch.stack([(keep_BhM[:, 0] & scope_BM).sum(-1) for keep_BhM, scope_BM in kept], -1))
            total_BL = torch.stack([scope_BM.sum(-1) for scope_BM in scopes], -1).cpu()
            shares_BRL = torch.stack(rows, 1).double().cpu() / total_BL[:, None].clamp(min=1)
            found += shares_BRL[total_BL.all(-1)]  # of samples that have something in scope
        refuse((not found, f"none of the prompts has anything in scope {self.scope!r}; choose other data"))
        return LayerShares(KEEP, rounded(torch.stack(found).mean(0).tolist()))

    def _compression(self, keep: float) -> Compression:
        return Compression(PrefixKV(sinks=self.sinks, recent=self.recent), keep, scope=self.scope)


@dataclass(frozen=True)
class DirectionCalibrator(Calibrator):
    """The direction of every head's queries; all rows of all prompts count alike."""

    name: ClassVar[str] = "q_filter"

    @torch.no_grad()
    def numbers(self, backbone: CompressedBackbone, batches: Batches) -> HeadDirections:
        use_packed_attention(backbone.family.decoder.config)
        grams, sums = dict[int, Tensor](), dict[int, Tensor]()

        def observe(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, rows: Rows) -> None:
            gram_BHdd, sum_BHd = query_moments(query, rows.visible_BM)
            grams[layer] = grams.get(layer, 0) + gram_BHdd.sum(0, keepdim=True)
            sums[layer] = sums.get(layer, 0) + sum_BHd.sum(0, keepdim=True)

        for batch in batches:
            backbone.run(batch, pad_left=True, observer=observe)
        heads = backbone.family.shape.num_kv_heads
        found = [directions(grams[layer], sums[layer], heads)[0].tolist() for layer in sorted(grams)]
        return HeadDirections(rounded(found))


@dataclass(frozen=True)
class CentreCalibrator(Calibrator):
    """Means over all rows of all prompts; see ``QueryCentres``."""

    name: ClassVar[str] = "triattention"
    any_text: ClassVar[bool] = True

    def check(self, backbone: CompressedBackbone) -> None:
        if backbone.family.length_dependent:
            words = f"{rotary_kind(backbone.family.decoder.rotary_emb)!r} positions, which change with the length"
            raise ValueError(f"triattention cannot foretell attention under {words}; use snapkv or rkv")

    @torch.no_grad()
    def numbers(self, backbone: CompressedBackbone, batches: Batches) -> QueryCentres:
        use_packed_attention(backbone.family.decoder.config)
        sums: dict[int, Tensor] = {}

        def observe(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, rows: Rows) -> None:
            rotation = backbone.family.rotation(layer, rows.position)
            query_BHMd = rotation.turn_back(query)
            marks_B1M1 = rows.visible_BM[:, None, :, None]
            each = query_BHMd, pair_lengths(query_BHMd, rotation), torch.ones_like(query_BHMd)
            sums[layer] = sums.get(layer, 0) + torch.stack([(x.double() * marks_B1M1).sum((0, 2)).cpu() for x in each])

        for batch in batches:
            backbone.run(batch, pad_left=True, observer=observe)
        mean_LHd, length_LHd, count_LHd = torch.stack([sums[layer] for layer in sorted(sums)], 1)
        return QueryCentres(*(rounded((x / count_LHd).tolist()) for x in (mean_LHd, length_LHd)))


TARGETS = [tenth / 10 for tenth in range(9, 0, -1)]
TOLERANCE = 0.01  # width of alpha's interval at which its search ends


@dataclass(frozen=True)
class PruneCalibrator(Calibrator):
    """FitPrune's calibration: how many visual tokens may leave after each layer, found by bisection over some prompts.

    Source: the release's ``statistical_analysis.py`` (ywh187/FitPrune, d28e418). Of a share alpha of attention that may
    go missing, every sample loses, after each layer, the tokens that are both among those of the lowest self-attention
    mass and among those of the lowest cross-attention mass that what stays still holds (1 - alpha) of the unpruned
    layer's. Nothing leaves any more once the average over layers would meet the target, the average share of visual
    tokens (the release forecasts FLOPs). The smallest alpha that meets it, to 0.01, gives the schedule: the mean over
    samples, of which each keeps one token at least.
    """

    name: ClassVar[str] = "fitprune"

    def check(self, backbone: CompressedBackbone) -> None:
        refuse((not backbone.family.sees_images, f"fitprune prunes visual tokens, and {backbone.family.name} has none"))

    @torch.no_grad()
    def numbers(self, backbone: CompressedBackbone, batches: Batches) -> PruneSchedules:
        prompts = [(batch, BearableCuts()) for batch in batches]
        for batch, cuts in prompts:
            cuts.run(backbone, batch)

        @cache
        def shares(alpha: float) -> Tensor:
            return torch.cat([cuts.shares(backbone, batch, alpha) for batch, cuts in prompts]).mean(0)

        if not any(bool((batch.regions_BN == Region.VISUAL).any()) for batch, _ in prompts):
            raise ValueError("none of the prompts has an image; choose other data")
        rows: list[list[float]] = []
        for target in TARGETS:
            low, high, row = 0.0, 1.0, None
            while high - low > TOLERANCE:
                alpha = (low + high) / 2
                stopped = stopped_at(shares(alpha).tolist(), target)
                low, high, row = (alpha, high, row) if stopped is None else (low, alpha, stopped)
            if row is not None and sum(row) < sum(rows[-1] if rows else [1.0] * len(row)):
                rows.append(row)
        refuse((not rows, "no layer can do without a token at any alpha; choose other prompts"))
        return PruneSchedules(rounded(rows))


def stopped_at(shares_L: list[float], target: float) -> list[float] | None:
    """End a schedule at the first layer whose share, kept from there, meets the target; None where none does."""
    depth = len(shares_L)
    rows = ([*shares_L[:layer], *[share] * (depth - layer)] for layer, share in enumerate(shares_L))
    return next((row for row in rows if sum(row) <= target * depth), None)


def bearable(mass_BM: Tensor, visual_BM: Tensor, total_B: Tensor, alpha: float) -> Tensor:
    """Mark the tokens of lowest mass without which others hold (1 - alpha) of a total, bool [B, M]; one stays."""
    mass_BM = mass_BM.double()
    order_BM = mass_BM.masked_fill(~visual_BM, torch.inf).sort(dim=-1, stable=True).indices
    ranked_BM = mass_BM.masked_fill(~visual_BM, 0.0).gather(-1, order_BM)
    spare_B1 = (ranked_BM.sum(-1) - (1 - alpha) * total_B.double())[:, None]
    within_BM = torch.arange(mass_BM.shape[1], device=mass_BM.device) < visual_BM.sum(-1, keepdim=True) - 1
    return torch.zeros_like(visual_BM).scatter(-1, order_BM, within_BM & (ranked_BM.cumsum(-1) <= spare_B1))


@dataclass(frozen=True, kw_only=True)
class BearableCuts(DecoderReducer):
    """Cuts that one batch of prompts can bear where ``alpha`` of each layer's attention may go missing.

    ``totals`` are the unpruned self and cross masses of each layer, [B]; ``held`` is left by a run in each, int64 [B].
    """

    name: str = "fitprune"
    alpha: list[float] = field(default_factory=lambda: [0.0])
    totals: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    held: dict[int, Tensor] = field(default_factory=dict)

    stage: ClassVar[Stage] = "decoder"

    def cuts(self, num_layers: int) -> tuple[int, ...]:
        return tuple(range(1, num_layers))

    def layer_tokens(self, tokens: int, num_layers: int) -> list[int]:
        return [tokens] * num_layers

    def cut(self, view: View) -> Cut:
        visual_BM, masses = view.visual, attention_masses(view)
        if view.layer not in self.totals:
            sums = [(mass_BM * visual_BM).double().sum(-1) for mass_BM in masses[:2]]
            self.totals[view.layer] = sums[0], sums[1]
        parts = zip(masses[:2], self.totals[view.layer], strict=True)
        own_BM, cross_BM = (bearable(mass_BM, visual_BM, total_B, self.alpha[0]) for mass_BM, total_B in parts)
        leave_BM = own_BM & (cross_BM | ~masses[2][:, None]) & (self.alpha[0] > 0)
        keep_BM = (view.regions_BN != Region.PADDING) & (~leave_BM | view.protected_BN)
        self.held[view.layer] = (keep_BM & visual_BM).sum(-1)
        return Cut(keep_BM, None)

    def run(self, backbone: CompressedBackbone, batch: Batch) -> None:
        """Run prompts, unrouted."""
        CompressedBackbone(backbone.family, self).eval().run(batch, force_gather=True)

    def shares(self, backbone: CompressedBackbone, batch: Batch, alpha: float) -> Tensor:
        """Return the share of its visual tokens that each layer holds, fp64 [P, L] of the samples with an image."""
        self.alpha[0] = alpha
        self.run(backbone, batch)
        first_B = (batch.regions_BN == Region.VISUAL).sum(-1)
        held_BL = torch.stack([first_B, *(self.held[layer] for layer in sorted(self.held))], -1)
        return (held_BL[first_B > 0].double() / first_B[first_B > 0, None]).cpu()


@dataclass(frozen=True)
class ThresholdCalibrator(Calibrator):
    """The threshold that meets a mean budget, read off the scores of whole prompts, and what it keeps of them.

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
        scale_of(named_method(self.eviction, self.eviction_options))

    def check(self, backbone: CompressedBackbone) -> None:
        compression = self._compression()
        compression.check(backbone.family)
        if self.protocol == "context_first":
            check_context_first(backbone, compression)

    @torch.no_grad()
    def numbers(self, backbone: CompressedBackbone, batches: Batches) -> ThresholdRecord:
        some = map(contexts_of, batches) if self.protocol == "context_first" else batches
        with reading_packed(backbone.family.decoder.config):
            passes = (scored_prompts(backbone, self._compression(), batch) for batch in some)
            prompts = [each for scored in passes for each in scored.scored_prompts(self.window)]
        refuse((not prompts, f"none of the prompts has anything in scope {self.scope!r}; choose other data"))
        found = mean_threshold(prompts, self.keep)
        mean, deviation = mean_deviation([each.share(found) for each in prompts])
        method = method_record(named_method(self.eviction, self.eviction_options))
        return ThresholdRecord(found, self.window, method, rounded(mean), rounded(deviation))

    def _compression(self) -> Compression:
        return Compression(named_method(self.eviction, self.eviction_options), scope=self.scope)
