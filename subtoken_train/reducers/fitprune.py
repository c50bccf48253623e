"""FitPrune (Ye et al., 2024): as many visual tokens leave after each layer as its attention was found to bear.

Source: "Fit and Prune: Fast and Training-free Visual Token Pruning for Multi-modal Large Language Models" (2409.10197)
and its release (ywh187/FitPrune, d28e418). A layer's attention is the largest of its heads. A visual token's score is
what all visual rows pay to it times what the text rows after the image pay to it; the lowest leave after the layer's
attention, so that the layer's own cache holds them. How many leave is found once for a backbone (``subtoken-train
calibrate fitprune``); without a ``calibration`` the release's tables for LLaVA-1.5-7B are read, and no other model
takes them. ``keep_ratio`` is the average share of the visual tokens that all layers hold; between two tabulated
schedules layers lie on straight lines, and schedules below the lowest are refused. Where no text follows the image,
what visual rows pay ranks alone. Routers act from layer 1 on.

Legend: M rows, L layers, R schedules.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise
from typing import ClassVar

from torch import Tensor

from subtoken_train.calibrations import CalibratedNumbers, check_table, check_table_shape, table_words
from subtoken_train.functional.attention_statistics import attention_paid
from subtoken_train.ledger.kv_budget import exact
from subtoken_train.reducers.base import Tower
from subtoken_train.reducers.staged import StagedReducer
from subtoken_train.view.view import View

PUBLISHED_TOKENS = 576
PUBLISHED = (
    (0, 0, 1, 2, 1, 0, 1, 4, 5, 5, 11, 4, 2, 2, 0, 0, 1, 1, 2, 4, 2, 10, 1, 1, 1, 2, 1, 1, 0, 1, 0, 0),
    (0, 0, 3, 3, 1, 1, 4, 16, 14, 15, 24, 4, 2, 3, 2, 0, 6, 0, 5, 13, 4, 19, 2, 1, 1, 1, 1, 1, 2, 1, 0, 0),
    (0, 0, 7, 6, 4, 5, 16, 40, 24, 21, 24, 4, 2, 3, 4, 0, 16, 0, 11, 26, 6, 32, 3, 1, 0, 1, 2, 2, 4, 0, 0, 0),
    (0, 1, 21, 13, 14, 11, 41, 53, 29, 15, 14, 5, 1, 4, 5, 1, 26, 1, 13, 28, 6, 27, 2, 1, 0, 0, 1, 1, 2, 0, 0, 0),
    (3, 7, 49, 24, 29, 17, 59, 41, 26, 8, 10, 6, 2, 5, 7, 2, 30, 3, 13, 27, 5, 23, 2, 1, 0, 0, 1, 1, 2, 0, 0, 0),
    (6, 17, 69, 31, 34, 19, 59, 30, 23, 6, 8, 7, 2, 5, 8, 2, 29, 4, 12, 25, 4, 19, 2, 1, 0, 0, 1, 0, 1, 0, 0, 0),
    (14, 33, 89, 36, 36, 20, 55, 21, 18, 4, 7, 5, 2, 5, 7, 4, 26, 5, 11, 24, 4, 18, 2, 1, 0, 0, 1, 0, 1, 0, 0, 0),
    (48, 79, 118, 41, 33, 17, 36, 9, 9, 2, 3, 2, 1, 3, 4, 8, 18, 7, 8, 20, 4, 13, 2, 1, 0, 0, 1, 0, 1, 0, 0, 0),
    (128, 127, 118, 35, 26, 8, 13, 3, 2, 1, 0, 0, 0, 2, 1, 8, 7, 8, 5, 11, 2, 6, 1, 1, 0, 0, 0, 1, 0, 0, 0, 0),
    (262, 153, 80, 19, 13, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 2, 1, 2, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0),
)
"""Tokens, of 576, that leave after each of LLaVA-1.5-7B's layers: the release's 10 to 90 % of FLOPs, with 55."""


@dataclass(frozen=True)
class PruneSchedules(CalibratedNumbers):
    """Shares of the visual tokens that layers hold, [R, L]: 1 in layer 0, falling; rows by falling average."""

    shares: list[list[float]]

    def __post_init__(self) -> None:
        check_table("shares", self.shares, 0, 1)
        for i, row in enumerate(self.shares):
            if row[0] != 1 or any(low > high for high, low in pairwise(row)):
                raise ValueError(f"shares[{i}] must start at 1 and never rise: layers after a cut hold no more")
            if row[-1] <= 0:
                raise ValueError(f"shares[{i}] ends at {row[-1]:g}; the last layer holds something")
        averages = [sum(row) / len(row) for row in self.shares]
        if any(low >= high for high, low in pairwise([1.0, *averages])):
            raise ValueError("shares must be rows of falling averages below 1")

    def check_shape(self, num_layers: int, num_kv_heads: int, head_dim: int) -> None:
        check_table_shape("shares", self.shares[0], num_layers)

    def words(self) -> str:
        return table_words("share of the visual tokens in every layer, a line per schedule", self.shares)


@dataclass(frozen=True, kw_only=True)
class FitPrune(StagedReducer):
    """FitPrune.

    Attributes:
        calibration: file of the backbone's schedules; None: those that are published for LLaVA-1.5-7B.
    """

    name: str = "fitprune"
    calibration: str | None = None

    calibrates: ClassVar[type[CalibratedNumbers]] = PruneSchedules
    ranks: ClassVar[bool] = True

    @cached_property
    def _schedules(self) -> list[list[Fraction]]:
        """Shares of all schedules, that of everything first, as exact numbers."""
        if self.calibrated is not None:
            rows = [[exact(share) for share in row] for row in self.calibrated.numbers.shares]
        else:
            left = [accumulate(row[:-1], lambda held, gone: held - gone, initial=PUBLISHED_TOKENS) for row in PUBLISHED]
            rows = [[Fraction(count, PUBLISHED_TOKENS) for count in row] for row in left]
        return [[Fraction(1)] * len(rows[0]), *rows]

    def cuts(self, num_layers: int) -> tuple[int, ...]:
        return tuple(range(1, num_layers))

    def layer_shares(self, num_layers: int) -> list[Fraction]:
        average = self.mean_share(num_layers)
        for high, low in pairwise(self._schedules):
            above, below = sum(high, Fraction()) / len(high), sum(low, Fraction()) / len(low)
            if below <= average:
                part = (above - average) / (above - below)
                return [more + part * (less - more) for more, less in zip(high, low, strict=True)]
        raise ValueError(
            f"fitprune: keep_ratio={self.keep_ratio:g} is the average over layers, and the lowest schedule of "
            f"{self.calibration or 'the published table'} has {float(below):.6g}; raise it, or calibrate a lower one"
        )

    def check_fit(self, backbone: str, sees_images: bool, num_layers: int, tower: Tower = ()) -> None:
        layers = len(self._schedules[0])
        if sees_images and (num_layers != layers or (self.calibration is None and backbone != "llava")):
            whose = f"{self.calibration} is" if self.calibration else "the published table is LLaVA-1.5-7B's,"
            raise ValueError(
                f"fitprune: {whose} of {layers} layers, and this is {backbone} of {num_layers}; make its own: "
                "subtoken-train calibrate fitprune, and name the file in reducer.calibration"
            )
        super().check_fit(backbone, sees_images, num_layers, tower)

    def scores(self, view: View) -> Tensor:
        self_BM, cross_BM, asks_B = attention_masses(view)
        return self_BM * cross_BM.where(asks_B[:, None], 1.0)


def attention_masses(view: View) -> tuple[Tensor, Tensor, Tensor]:
    """Masses that visual rows, and text after the image, pay each row, [B, M] (largest head); where text is, [B]."""
    visual_BM = view.visual
    after_BM = view.prompt & ~visual_BM & (visual_BM.cumsum(-1) > 0)
    masses = []
    for marks_BM in (visual_BM, after_BM):
        paid_BM = attention_paid(view.blocks(marks_BM), "max")
        masses.append(paid_BM / marks_BM.sum(-1, keepdim=True).clamp(min=1))
    return masses[0], masses[1], after_BM.any(-1)
