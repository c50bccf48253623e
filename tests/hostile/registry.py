"""The classes of hostile input: a new kind of input costs its file and one line here."""

from __future__ import annotations

from hostile import adapters, grids, recipe_code, recipe_files, recipes, results, runs
from hostile.runner import Make

CLASSES: dict[str, tuple[Make, int]] = {
    "recipes": (recipes.make, 4),
    "recipe_files": (recipe_files.make, 3),
    "recipe_code": (recipe_code.make, 4),
    "adapters": (adapters.make, 6),
    "runs": (runs.make, 4),
    "results": (results.make, 6),
    "grids": (grids.make, 4),
}
"""Generator and weight by name: a weight of 2 draws twice as many cases as one of 1."""
