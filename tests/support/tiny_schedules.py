"""FitPrune's calibration files for the random models of the matrix, made once."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from subtoken_train.families.family import shapes_digest
from subtoken_train.reducers.fitprune import PruneSchedules
from subtoken_train.types import Identity
from tests.support.calibration_files import written
from tests.support.truth_models import family_of


@cache
def schedules_of(name: str) -> str:
    """The file of a family: a row that drops a third after layer 0 and half in the end, and one that drops more."""
    family = family_of(name)
    depth = family.shape.num_layers
    rows = [[1.0, *[0.66] * (depth - 2), 0.5], [1.0, *[0.3] * (depth - 2), 0.2]]
    made_on = Identity(name, None, str(family.model.config.model_type), shapes_digest(family))
    folder = Path(tempfile.mkdtemp(prefix="schedules-"))
    return written(folder / f"{name}.json", "fitprune", PruneSchedules(rows), made_on)
