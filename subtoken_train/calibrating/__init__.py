"""Making calibrations; a new one is a class and a line in ``CALIBRATORS``."""

from typing import TYPE_CHECKING

from subtoken_train.registry import Registry

if TYPE_CHECKING:
    from subtoken_train.calibrating.base import Calibrator

CALIBRATORS: "Registry[Calibrator]" = Registry(
    "method that is calibrated",
    group="subtoken_train.calibrators",
    package=__name__,
    base="base:Calibrator",
    named=True,
    builtin={
        "prefixkv": "layers:PrefixCalibrator",
        "duo_attention": "heads:DuoCalibrator",
        "headkv": "heads:NeedleCalibrator",
        "q_filter": "layers:DirectionCalibrator",
        "sparsemm": "heads:VisualCalibrator",
        "threshold": "layers:ThresholdCalibrator",
        "lkv": "heads:BudgetCalibrator",
        "kvzap": "token_scorers:ScorerCalibrator",
        "triattention": "layers:CentreCalibrator",
        "fitprune": "layers:PruneCalibrator",
    },
)  # by the name of the method that reads the calibration; ``threshold`` is read in the place of a budget
