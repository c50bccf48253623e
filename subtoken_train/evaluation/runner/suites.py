"""Grids that ship with their models and make their own data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from subtoken_train.datasets.scene_files import write_scene_split
from subtoken_train.errors import unknown_name
from subtoken_train.evaluation.runner.read_grid import read_grid
from subtoken_train.evaluation.runner.spec import Grid, TaskSpec
from subtoken_train.resources import resource

SUITES = {"mini": ("mini_scenes", "mini_recall")}
"""The grids of a suite, from ``recipes/eval``: one per embedded model."""
SCENES = 1200  # test questions of seed 1, the first of those that recipes/README.md's tables ask


def suite(name: str, out: Path, **overrides: Any) -> list[Grid]:
    """The grids of a suite, with one results folder for all; the scenes are written below it, once.

    Args:
        name: of ``SUITES``.
        out: results folder.
        overrides: see ``read_grid``.

    Raises:
        ValueError: no such suite.
    """
    if name not in SUITES:
        raise unknown_name("suite", name, SUITES)
    grids = [read_grid(resource(f"recipes/eval/{grid}.yaml"), out=out, **overrides) for grid in SUITES[name]]
    scenes = out / "data" / "scenes"
    scenes.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(scenes.parent / ".lock"):  # of several processes one writes
        if not (scenes / "test.json").is_file():  # written after the images
            write_scene_split(scenes, "test", SCENES, seed=1)
    return [replace(grid, tasks=tuple(_with_scenes(task, scenes) for task in grid.tasks)) for grid in grids]


def _with_scenes(task: TaskSpec, scenes: Path) -> TaskSpec:
    return replace(task, source=str(scenes)) if task.name.startswith("scenes_") else task
