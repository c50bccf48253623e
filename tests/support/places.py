"""Where the project keeps what tests read."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"


def recipe(name: str) -> Path:
    """The file of a run's recipe; the folder is the name's first word."""
    path = RECIPES / name.partition("_")[0] / f"{name}.yaml"
    assert path.is_file(), f"no recipe {name}"
    return path


def run_recipes() -> list[Path]:
    """The recipes of runs: all but grids, lists of arms and overlays."""
    return sorted(path for path in RECIPES.glob("*/*.yaml") if path.stem.startswith(f"{path.parent.name}_"))
