"""The fits that a grid's adapters need: which recipe makes each, what it starts from, and what stands already.

An adapter ``runs/NAME/adapter`` (or ``runs/NAME``) is made by the recipe NAME: the file ``NAME.yaml`` here or in
``recipes/``, else the shipped one; ``runs/NAME_anchor`` by the anchor of the recipe NAME, where it has no recipe of its
own. Nothing else records what makes an adapter that is not there yet.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from subtoken_train.artifact.hub import adapter_in
from subtoken_train.cli.anchor import SUFFIX, anchor_words
from subtoken_train.cli.command_line import SweepRun
from subtoken_train.cli.recipe_source import read_recipe, read_source
from subtoken_train.cli.run_plan import RunPlan, added, gpu_time, plan_of_recipe
from subtoken_train.errors import shell_words
from subtoken_train.evaluation.runner.dry_run import recipe_of
from subtoken_train.evaluation.runner.spec import read_grid
from subtoken_train.families.backbone_config import is_hub_id, resolve
from subtoken_train.resources import named_recipe


@dataclass
class GridFits:
    """Runs of a grid.

    Attributes:
        runs: those that are to be trained, each after what it starts from.
        later: of them, those that start from another run of the list: name -> that run's name.
        standing: adapters that are there.
        published: adapters that are read as Hub ids, which nothing here trains.
    """

    grid: str
    runs: list[SweepRun] = field(default_factory=list)
    later: dict[str, str] = field(default_factory=dict)
    standing: list[str] = field(default_factory=list)
    published: list[str] = field(default_factory=list)

    def head(self) -> str:
        """Return one line: how many stand, and how many are to be trained."""
        words = f"{shell_words(self.grid)}: {len(self.standing)} adapters stand, {len(self.runs)} to train"
        return words + (f", not trained here but read from the Hub: {', '.join(self.published)}" * bool(self.published))

    def later_lines(self) -> list[str]:
        """Return what one array job cannot train yet, in words; nothing where all can start at once."""
        waits = [f"{shell_words(name)} (starts from {shell_words(start)})" for name, start in self.later.items()]
        return [f"not in this array, call it again when the others stand: {', '.join(waits)}"] if waits else []


def grid_fits(given: str) -> GridFits:
    """Return the fits of a grid's arms, read from its file alone."""
    path = named_recipe(given, "grid")
    fits = GridFits(path.stem)
    for adapter in dict.fromkeys(str(arm.adapter) for arm in read_grid(path).arms if arm.adapter is not None):
        _add(fits, adapter, f"grid {path.stem}")
    return fits


def _add(fits: GridFits, adapter: str, asker: str) -> SweepRun | None:
    """Add the run that makes an adapter, after the runs that it starts from; None: it stands, or is published."""
    folder = Path(adapter).parent if Path(adapter).name == "adapter" else Path(adapter)
    known = next((run for run in fits.runs if run.folder == folder), None)
    if known is not None or adapter in (*fits.standing, *fits.published):
        return known
    if adapter_in(Path(resolve(adapter))) is not None:
        fits.standing.append(adapter)
        return None
    recipe, overrides = recipe_of(adapter), list[tuple[str, str]]()
    if recipe is None and (base := recipe_of(str(folder.with_name(folder.name.removesuffix(SUFFIX))))) is not None:
        recipe, words = base, anchor_words(["--config", str(base)])[2:]
        pairs = [word.removeprefix("--").split("=", 1) for word in words]
        overrides = [(key, value) for key, value in pairs if key != "output_dir"]
    if recipe is None and is_hub_id(adapter) and not Path(adapter).parent.is_dir():
        fits.published.append(adapter)
        return None
    if recipe is None:
        raise ValueError(
            f"{asker} needs the adapter {adapter}, which is not here and which no recipe makes: there is no "
            f"{folder.name}.yaml here or in recipes/, and none ships; write that recipe, or take the arm out"
        )
    start: Any = (read_recipe(recipe).get("model") or {}).get("stage2") or {}
    first = _add(fits, str(start["adapter"]), f"recipe {recipe.stem}") if "adapter" in start else None
    config = recipe.stem if recipe.is_absolute() else str(recipe)  # a shipped one by its name
    run = SweepRun(folder.name, folder, (config,), tuple(overrides))
    fits.runs.append(run)
    if first is not None:
        fits.later[run.name] = first.name
    return run


def fits_needs(fits: GridFits) -> list[RunPlan]:
    """Return what each run needs, its model laid out, so that one that can never train is refused before the first."""
    each = []
    for run in fits.runs:
        try:
            each.append(plan_of_recipe(read_source(run.fit_arguments()[1:])))
        except ValueError as error:
            raise ValueError(f"{run.name}: {error}") from None
    return each


def plan_lines(fits: GridFits, each: list[RunPlan]) -> list[str]:
    """Return a command and its time for each run, and what all of them need."""
    lines = [fits.head()]
    for run, needs in zip(fits.runs, each, strict=True):
        time = "" if needs.on_cpu or needs.flops is None else f"  # {gpu_time(needs.flops, 'H100')}"
        lines.append(f"{shell_words('subtoken-train', *run.fit_arguments())}{time}")
    return [*lines, "", "what they need (a prediction)", *(f"  {line}" for line in added(each).lines())]
