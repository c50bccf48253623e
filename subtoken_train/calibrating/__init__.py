"""Making calibrations; a new one is a class and a line in ``CALIBRATORS``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from subtoken_train.registry import Registry

if TYPE_CHECKING:
    from subtoken_train.calibrating.base import Calibrator

CALIBRATORS: Registry[Calibrator] = Registry(
    "method that is calibrated",
    group="subtoken_train.calibrators",
    package=__name__,
    base="base:Calibrator",
    named=True,
    builtin={
        "prefixkv": "layer_shares:PrefixCalibrator",
        "duo_attention": "head_alphas:DuoCalibrator",
        "headkv": "head_scores:NeedleCalibrator",
        "q_filter": "layer_shares:DirectionCalibrator",
        "sparsemm": "head_scores:VisualCalibrator",
        "threshold": "thresholds:ThresholdCalibrator",
        "kvzap": "token_scorers:ScorerCalibrator",
        "fitprune": "prune_schedules:PruneCalibrator",
    },
)
"""By the name of the method that reads the calibration; ``threshold`` is read in the place of a budget."""
