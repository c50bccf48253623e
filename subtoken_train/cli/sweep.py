"""``subtoken-train sweep``: overrides of one recipe, or the fits of a grid, one after another or as a SLURM array."""

from __future__ import annotations

import re
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from subtoken_train.cli.command_line import FLAGS, SweepRun
from subtoken_train.cli.terminal import show
from subtoken_train.errors import plain, shell_words
from subtoken_train.resources import named_recipe

if TYPE_CHECKING:
    from rich.table import Table


HELP = """Train every combination of some overrides of a recipe, each in a folder named by them, or a grid's adapters.

  subtoken-train sweep --config recipes/tiny_fastv25_s16k4.yaml \\
    --set model.routing.kept_groups=2,4,8 --set model.optimizer.learning_rate=1e-4,2e-4

  subtoken-train sweep --grid table1_llava7b --dry-run

--grid trains the adapters that a grid of 'evaluate' names and that are not there: runs/NAME/adapter by the recipe NAME,
stage 1 before stage 2. Models are laid out first; --dry-run lists the fits with their GPU hours, disk and downloads.

Every combination is parsed before the first one runs. When called again, it skips finished runs and resumes stopped
ones from their last checkpoint; a run that fails is reported and the others continue. Write a list value in brackets:
[0,1]. The exit code is 0 if all runs finished, 1 if one failed, and 130 after Ctrl-C."""

INTERRUPTED = 130
SCORES = ("train/loss", "val/loss", "val/token_accuracy", "eval/accuracy", "tokens_per_s/after")


def add_arguments(parser: ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--config", action="append", metavar="FILE", help="recipe; later files override")
    parser.add_argument("--set", action="append", metavar="KEY=A,B", help="a key and its values; repeatable")
    parser.add_argument("--grid", metavar="GRID", help="train a grid's adapters instead: a file, or a shipped name")
    parser.add_argument("--output_dir", metavar="DIR", help="folder of the runs (runs/sweep); a grid names its own")
    parser.add_argument("--slurm", action="store_true", help="print an sbatch script of the runs, and run nothing")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, and run nothing")


def run(args: Namespace) -> int:
    """Check all runs, then train or print them."""
    runs, later, lines, name = _of_grid(args) if args.grid is not None else _of_settings(args)
    if not runs:
        print(*lines, sep="\n")
        return 0
    if args.slurm:
        now = [one for one in runs if one.name not in later]
        print(slurm_script(now, now[0].folder.parent, name), end="")
        print("".join(f"# {line}\n" for line in set(later.values())), end="")
        return 0
    if lines:
        print(*lines, sep="\n", flush=True)
    return 0 if args.dry_run else train_all(runs)


def _of_settings(args: Namespace) -> tuple[list[SweepRun], dict[str, str], list[str], str | None]:
    """Return the combinations of a recipe's overrides, each parsed before the first one starts."""
    if not args.config or not args.set:
        raise ValueError("a sweep needs --config RECIPE and --set KEY=A,B, or --grid GRID")
    from subtoken_train.cli.recipe_source import read_recipe, read_source

    runs = sweep_runs(args.config, args.set, Path(args.output_dir or "runs/sweep"))
    sources = [read_source(one.fit_arguments()[1:]) for one in runs]
    from subtoken_train.cli.terminal import quiet_libraries

    quiet_libraries()
    from subtoken_train.cli.recipe import RecipeCLI

    for one, source in zip(runs, sources, strict=True):
        recipe = RecipeCLI(source).resolved()
        if one.finished and read_recipe(one.folder / "recipe.yaml") != recipe:
            raise ValueError(f"{one.folder} holds a finished run of another recipe; choose another --output_dir")
    commands = [shell_words("subtoken-train", *one.fit_arguments()) for one in runs] if args.dry_run else []
    return runs, {}, commands, None


def _of_grid(args: Namespace) -> tuple[list[SweepRun], dict[str, str], list[str], str | None]:
    for name in ("config", "set", "output_dir"):
        if getattr(args, name) is not None:
            raise ValueError(f"--{name} does not apply to --grid, whose arms name their runs; leave it out")
    named_recipe(args.grid, "grid")
    from subtoken_train.cli.terminal import quiet_libraries

    quiet_libraries()
    from subtoken_train.cli.grid_fits import fits_needs, grid_fits, plan_lines

    fits = grid_fits(args.grid)
    each = fits_needs(fits)
    lines = plan_lines(fits, each) if fits.runs else [f"{fits.head()}: nothing to do"]
    return fits.runs, dict.fromkeys(fits.later, *fits.later_lines()) if fits.later else {}, lines, fits.grid


def train_all(runs: list[SweepRun]) -> int:
    """Train runs one after another, print their table, and return the exit code."""
    outcomes: list[str] = []
    for number, one in enumerate(runs, start=1):
        print(f"[{number}/{len(runs)}] {one.name}", flush=True)
        outcomes.append(run_one(one))
        if outcomes[-1] == "interrupted":
            break
    show(sweep_table(runs[: len(outcomes)], outcomes), 160)
    if "interrupted" in outcomes:
        return INTERRUPTED
    return int(any(words.startswith("failed") for words in outcomes))


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


_UNSAFE = re.compile(r"[^A-Za-z0-9.,=+_\-]+")
_RESERVED = ("output_dir", *FLAGS)


def sweep_runs(configs: Sequence[str], settings: Sequence[str], folder: Path) -> list[SweepRun]:
    """Every combination of the settings' values (``KEY=A,B`` each), the last key changing fastest."""
    axes = dict[str, list[str]]()
    for setting in settings:
        key, values = parse_setting(setting)
        if key in axes:
            raise ValueError(f"--set {key} is given twice; write its values in one: --set {key}=A,B")
        axes[key] = values
    short = _short_names(list(axes))
    runs: list[SweepRun] = []
    for combination in product(*axes.values()):
        chosen = tuple(zip(axes, combination, strict=True))
        name = _UNSAFE.sub("_", ",".join(f"{short[key]}={value}" for key, value in chosen))
        if any(one.name == name for one in runs):
            raise ValueError(
                f"two runs would share the folder {name}: their values differ only in punctuation, or not at all"
            )
        runs.append(SweepRun(name, folder / name, tuple(configs), chosen))
    return runs


def parse_setting(setting: str) -> tuple[str, list[str]]:
    """``KEY=A,B`` as the key and its values; commas inside brackets or braces separate nothing."""
    key, equals, text = setting.partition("=")
    key = key.strip().removeprefix("--")
    values, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            values.append("")
        else:
            values[-1] += letter
    values = [value.strip() for value in values]
    if not equals or not key or not all(values):
        raise ValueError(f"--set {setting!r} must be KEY=VALUE,VALUE, for instance model.routing.kept_groups=2,4,8")
    if key in _RESERVED:
        raise ValueError(f"--set {key}: a sweep sets it for every run itself; --output_dir DIR moves all of them")
    return key, values


def slurm_script(runs: Sequence[SweepRun], folder: Path, name: str | None = None) -> str:
    """An sbatch script whose array has one task per run; partition, GPUs and time are the user's to add.

    ``name``: of the job; None: the folder's.
    """
    tasks = "\n".join(
        f"  {number}) exec srun {shell_words('subtoken-train', *one.fit_arguments())} ;;"
        for number, one in enumerate(runs)
    )
    place, log = shell_words(folder), shell_words(folder / "slurm-%A_%a.log")
    if log.startswith("$"):
        raise ValueError(f"the runs' folder {str(folder)!r} has a control character, which no #SBATCH line can name")
    return f"""#!/bin/bash
#SBATCH --job-name={_UNSAFE.sub("_", name or folder.name)}
#SBATCH --array=0-{len(runs) - 1}
#SBATCH --output={log}
# Add --partition, --gpus-per-node, --ntasks-per-node (one per GPU) and --time for your cluster.
# Before sbatch: mkdir -p {place}
case "$SLURM_ARRAY_TASK_ID" in
{tasks}
esac
"""


def _short_names(keys: list[str]) -> dict[str, str]:
    leaves = [key.rpartition(".")[2] for key in keys]
    return {key: leaf if leaves.count(leaf) == 1 else key for key, leaf in zip(keys, leaves, strict=True)}
