"""Calibration files for tests: of any backbone, or of none."""

from subtoken_train.calibrations import Calibration, CalibrationData, write_calibration
from subtoken_train.types import Identity

NOBODY = Identity("nowhere/model", None, "llama", "0" * 64)


def written(path, method, numbers, backbone=NOBODY, **settings):
    """Write a calibration; the path as a setting names it."""
    write_calibration(path, Calibration(method, backbone, settings, numbers, CalibrationData("tests", 1, 2)))
    return str(path)
