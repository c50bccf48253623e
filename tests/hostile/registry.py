"""The classes of hostile input: a new kind of input costs its file and one line here."""

from __future__ import annotations

from tests.hostile import (
    adapters,
    arguments,
    backbones,
    benchmark_files,
    caches,
    calibrations,
    calls,
    data_files,
    folders,
    grids,
    own_folders,
    pictures,
    recipe_code,
    recipe_files,
    recipes,
    results,
    runs,
)  # fmt: skip
from tests.hostile.runner import Make

CLASSES: dict[str, tuple[Make, int]] = {
    "recipes": (recipes.make, 4),
    "recipe_files": (recipe_files.make, 3),
    "recipe_code": (recipe_code.make, 4),
    "adapters": (adapters.make, 6),
    "runs": (runs.make, 4),
    "results": (results.make, 6),
    "grids": (grids.make, 4),
    "data_files": (data_files.make, 5),
    "pictures": (pictures.make, 5),
    "arguments": (arguments.make, 8),
    "folders": (folders.make, 4),
    "benchmark_files": (benchmark_files.make, 4),
    "backbones": (backbones.make, 4),
    "calls": (calls.make, 4),
    "calibrations": (calibrations.make, 3),
    "caches": (caches.make, 4),
    "own_folders": (own_folders.make, 5),
}
"""Generator and weight by name: a weight of 2 draws twice as many cases as one of 1."""
