"""``subtoken-train sweep``: a grid of overrides of one recipe, run one after another or as a SLURM array."""

from __future__ import annotations

import shlex
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from subtoken_train.cli.command_line import ALLOW_CODE
from subtoken_train.cli.sweep_grid import SweepRun, slurm_script, sweep_runs
from subtoken_train.errors import plain

if TYPE_CHECKING:
    from rich.table import Table

HELP = """Train every combination of some overrides of a recipe, each in a folder named by them.

  subtoken-train sweep --config recipes/tiny_fastv25_s16k4.yaml \\
    --set model.routing.kept_groups=2,4,8 --set model.optimizer.learning_rate=1e-4,2e-4

Every combination is parsed before the first one runs. Called again, finished runs are skipped and stopped ones go on
from their last checkpoint; a run that fails is reported and the others go on. A list as a value stands in brackets:
[0,1]. The exit code is 0 where all runs are finished, 1 where one failed, 130 after Ctrl-C."""

INTERRUPTED = 130
SCORES = ("train/loss", "val/loss", "val/token_accuracy", "eval/accuracy", "tokens_per_s/after")


def add_arguments(parser: ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--config", action="append", required=True, metavar="FILE", help="recipe; later files override")
    parser.add_argument(
        "--set", action="append", required=True, metavar="KEY=A,B", help="a key and its values; repeatable"
    )
    parser.add_argument("--output_dir", default="runs/sweep", metavar="DIR", help="folder of the runs (runs/sweep)")
    parser.add_argument("--slurm", action="store_true", help="print an sbatch script of the grid, and run nothing")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, and run nothing")
    parser.add_argument(ALLOW_CODE, action="store_true", help="let the recipes run code (docs/recipe_safety.md)")


def run(args: Namespace) -> int:
    """Check all of the grid, then run it or print it."""
    runs = sweep_runs(args.config, args.set, Path(args.output_dir), args.allow_code)
    check_all(runs)
    if args.slurm:
        print(slurm_script(runs, Path(args.output_dir)), end="")
        return 0
    if args.dry_run:
        print(plain("\n".join(shlex.join(["subtoken-train", *one.fit_arguments()]) for one in runs)))
        return 0
    outcomes: list[str] = []
    for number, one in enumerate(runs, start=1):
        print(f"[{number}/{len(runs)}] {one.name}", flush=True)
        outcomes.append(run_one(one))
        if outcomes[-1] == "interrupted":
            break
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 160).print(sweep_table(runs[: len(outcomes)], outcomes))
    if "interrupted" in outcomes:
        return INTERRUPTED
    return int(any(words.startswith("failed") for words in outcomes))


def check_all(runs: list[SweepRun]) -> None:
    """Parse every run before the first one starts.

    Raises:
        ValueError: what ``fit`` would say to one of them, or a finished run of another recipe in its folder.
    """
    from subtoken_train.cli.recipe_source import read_recipe, read_source

    sources = [read_source(one.fit_arguments()[1:]) for one in runs]
    from subtoken_train.cli.quiet import quiet_libraries

    quiet_libraries()
    from subtoken_train.cli.recipe import RecipeCLI

    for one, source in zip(runs, sources, strict=True):
        recipe = RecipeCLI(source).resolved()
        if one.finished and read_recipe(one.folder / "recipe.yaml") != recipe:
            raise ValueError(f"{one.folder} holds a finished run of another recipe; choose another --output_dir")


def run_one(one: SweepRun) -> str:
    """Train one run in a process of its own; the outcome in words."""
    if one.finished:
        print(f"  finished before: {one.folder}")
        return "finished before"
    resume = ["--resume"] if one.resumable else []
    process = subprocess.Popen([sys.executable, "-m", "subtoken_train", *one.fit_arguments(), *resume])
    try:
        code = process.wait()
    except KeyboardInterrupt:  # the run got it too: it saves, then leaves
        process.wait()
        return "interrupted"
    return {0: "finished", INTERRUPTED: "interrupted"}.get(code, f"failed (exit code {code})")


def sweep_table(runs: list[SweepRun], outcomes: list[str]) -> Table:
    """A terminal table: one row per run with the last value of each score that any of them logged."""
    from rich.table import Table
    from rich.text import Text

    found = [one.last_metrics(SCORES) for one in runs]
    columns = [name for name in SCORES if any(name in metrics for metrics in found)]
    table = Table(title="sweep: last values")
    table.add_column("run")
    table.add_column("outcome")
    for name in ("step", *columns):
        table.add_column(name, justify="right")
    for one, words, metrics in zip(runs, outcomes, found, strict=True):
        cells = [f"{metrics[name]:.4g}" if name in metrics else "" for name in columns]
        table.add_row(
            Text(plain(one.name)),
            Text(plain(words)),
            str(int(metrics["step"]) + 1) if "step" in metrics else "",
            *cells,
        )
    return table
