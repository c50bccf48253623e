"""FitPrune's calibration: how many visual tokens may leave after each layer, found by bisection over some prompts.

Source: the release's ``statistical_analysis.py`` (ywh187/FitPrune, d28e418). Of a share alpha of attention that may go
missing, every sample loses, after each layer, the tokens that are both among those of the lowest self-attention mass
and among those of the lowest cross-attention mass that what stays still holds (1 - alpha) of the unpruned layer's; the
layers after it run without them. Nothing leaves any more once the average over layers would meet the target. The
smallest alpha that meets it, to 0.01, gives the schedule: the mean over samples. The target is the average share of
visual tokens over layers, a tenth to nine tenths, where the release forecasts FLOPs; a sample keeps one token at least.

Legend: B batch, M rows, L layers, P prompts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from subtoken_train.calibrating.base import Batches, Calibrator, Progress, rounded
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.reducers.base import Stage
from subtoken_train.reducers.fitprune import PruneSchedules, attention_masses
from subtoken_train.reducers.staged import Cut, DecoderReducer
from subtoken_train.types import Batch, Region
from subtoken_train.view.view import View

TARGETS = [tenth / 10 for tenth in range(9, 0, -1)]
TOLERANCE = 0.01  # width of alpha's interval at which its search ends


@dataclass(frozen=True)
class PruneCalibrator(Calibrator):
    """Schedules for all budgets; see ``Calibrator`` for the settings."""

    name: ClassVar[str] = "fitprune"

    def check(self, backbone: CompressedBackbone) -> None:
        if not backbone.family.sees_images:
            raise ValueError(f"fitprune prunes visual tokens, and {backbone.family.name} has none")

    @torch.no_grad()
    def numbers(self, backbone: CompressedBackbone, batches: Batches, show: Progress | None = None) -> PruneSchedules:
        prompts = [(batch, BearableCuts()) for batch in batches]
        found: dict[float, Tensor] = {}
        for batch, cuts in prompts:
            cuts.run(backbone, batch)

        def shares(alpha: float) -> Tensor:
            if alpha not in found:
                found[alpha] = torch.cat([cuts.shares(backbone, batch, alpha) for batch, cuts in prompts]).mean(0)
            return found[alpha]

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
        if not rows:
            raise ValueError("no layer can do without a token at any alpha; choose other prompts")
        return PruneSchedules(rounded(rows))


def stopped_at(shares_L: list[float], target: float) -> list[float] | None:
    """A schedule up to the layer after which nothing more need leave; None where its average stays above a target."""
    depth = len(shares_L)
    for layer, share in enumerate(shares_L):
        row = [*shares_L[:layer], *[share] * (depth - layer)]
        if sum(row) <= target * depth:
            return row
    return None


def bearable(mass_BM: Tensor, visual_BM: Tensor, total_B: Tensor, alpha: float) -> Tensor:
    """Tokens of the lowest mass without which others hold (1 - alpha) of a total, bool [B, M]; one stays."""
    mass_BM = mass_BM.double()
    order_BM = mass_BM.masked_fill(~visual_BM, torch.inf).sort(dim=-1, stable=True).indices
    ranked_BM = mass_BM.masked_fill(~visual_BM, 0.0).gather(-1, order_BM)
    spare_B1 = (ranked_BM.sum(-1) - (1 - alpha) * total_B.double())[:, None]
    within_BM = torch.arange(mass_BM.shape[1], device=mass_BM.device) < visual_BM.sum(-1, keepdim=True) - 1
    leave_BM = within_BM & (ranked_BM.cumsum(-1) <= spare_B1)
    return torch.zeros_like(visual_BM).scatter(-1, order_BM, leave_BM)


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
        total_self_B, total_cross_B = self.totals[view.layer]
        leave_BM = bearable(masses[0], visual_BM, total_self_B, self.alpha[0])
        cross_BM = bearable(masses[1], visual_BM, total_cross_B, self.alpha[0])
        leave_BM &= cross_BM | ~masses[2][:, None]
        keep_BM = (view.regions_BN != Region.PADDING) & (~leave_BM | view.protected_BN)
        if self.alpha[0] == 0:
            keep_BM = view.regions_BN != Region.PADDING
        self.held[view.layer] = (keep_BM & visual_BM).sum(-1)
        return Cut(keep_BM, None)

    def run(self, backbone: CompressedBackbone, batch: Batch) -> None:
        """Run prompts, unrouted."""
        CompressedBackbone(backbone.family, self).eval().run(batch, force_gather=True)

    def shares(self, backbone: CompressedBackbone, batch: Batch, alpha: float) -> Tensor:
        """Share of its visual tokens that each layer holds, fp64 [P, L] of the samples with an image."""
        self.alpha[0] = alpha
        self.run(backbone, batch)
        first_B = (batch.regions_BN == Region.VISUAL).sum(-1)
        held_BL = torch.stack([first_B, *(self.held[layer] for layer in sorted(self.held))], -1)
        return (held_BL[first_B > 0].double() / first_B[first_B > 0, None]).cpu()
