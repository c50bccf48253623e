"""``subtoken-train sweep``: overrides of one recipe, or the fits of a grid, one after another or as a SLURM array.

An adapter ``runs/NAME/adapter`` (or ``runs/NAME``) of a grid is made by the recipe NAME: the file ``NAME.yaml`` here or
in ``recipes/``, else the shipped one; ``runs/NAME_anchor`` by the anchor of the recipe NAME, where it has no recipe of
its own. Nothing else records what makes an adapter that is not there yet.
"""

import re
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from subtoken_train.cli.command_line import FLAGS, hourly_price
from subtoken_train.cli.recipe_source import read_recipe, read_source
from subtoken_train.cli.terminal import quiet_libraries
from subtoken_train.errors import at_place, plain, refuse, shell_words
from subtoken_train.resources import named_recipe
from subtoken_train.training.checkpoints import newest_complete

if TYPE_CHECKING:
    from subtoken_train.cli.run_plan import RunPlan

HELP = """Train every combination of some overrides of a recipe, each in a folder named by them, or a grid's adapters.

  subtoken-train sweep --config recipes/tiny_fastv25_s16k4.yaml \\
    --set model.routing.kept_groups=2,4,8 --set model.optimizer.learning_rate=1e-4,2e-4

  subtoken-train sweep --grid table1_llava7b --dry-run

--grid trains the adapters that a grid of 'evaluate' names and that are not there: runs/NAME/adapter by the recipe NAME,
stage 1 before stage 2. --dry-run lists the fits with their GPU hours, disk and downloads, after checking every one.

A second call skips finished runs and resumes stopped ones; a run that fails is reported and the others continue. Write
a list value in brackets: [0,1]. The exit code is 0 if all runs finished, 1 if one failed, and 130 after Ctrl-C."""

INTERRUPTED = 130
SCORES = ("train/loss", "val/loss", "val/token_accuracy", "eval/accuracy", "tokens_per_s/after")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--config", action="append", metavar="FILE", help="recipe; later files override")
    parser.add_argument("--set", action="append", metavar="KEY=A,B", help="a key and its values; repeatable")
    parser.add_argument("--grid", metavar="GRID", help="train a grid's adapters instead: a file, or a shipped name")
    parser.add_argument("--output_dir", metavar="DIR", help="folder of the runs (runs/sweep); a grid names its own")
    parser.add_argument("--slurm", action="store_true", help="print an sbatch script of the runs, and run nothing")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, and run nothing")
    parser.add_argument("--price", type=hourly_price, metavar="P", help="what a GPU costs an hour: the sum is printed")


@dataclass(frozen=True)
class SweepRun:
    """One combination of a sweep, or one fit of a grid; ``name`` is its overrides in short, and its folder's name."""

    name: str
    folder: Path
    configs: tuple[str, ...]
    overrides: tuple[tuple[str, str], ...] = ()

    def fit_arguments(self) -> list[str]:
        """Return ``fit --config ... --KEY=VALUE ... --output_dir=...`` as a list."""
        configs = [word for path in self.configs for word in ("--config", path)]
        return ["fit", *configs, *(f"--{key}={value}" for key, value in self.overrides), f"--output_dir={self.folder}"]

    @property
    def finished(self) -> bool:
        """True if the run has left its adapter, which is written last."""
        return (self.folder / "adapter" / "subtoken_config.json").is_file()


@dataclass
class Fits:
    """Runs to train; ``later``: name -> the run that it starts from; other adapters are there or on the Hub."""

    name: str
    runs: list[SweepRun] = field(default_factory=list)
    later: dict[str, str] = field(default_factory=dict)
    standing: list[str] = field(default_factory=list)
    published: list[str] = field(default_factory=list)


def run(args: Namespace) -> int:
    if args.grid is None:
        refuse((not args.config or not args.set, "a sweep needs --config RECIPE and --set KEY=A,B, or --grid GRID"))
        folder = Path(args.output_dir or "runs/sweep")
        fits = Fits(folder.name, sweep_runs(args.config, args.set, folder))
    else:
        for name in ("config", "set", "output_dir"):
            if getattr(args, name) is not None:
                raise ValueError(f"--{name} does not apply to --grid, whose arms name their runs; leave it out")
        named_recipe(args.grid, "grid")
        quiet_libraries()
        fits = grid_fits(args.grid)
    lines = _plan_lines(fits, args.price)
    if args.slurm and fits.runs:
        now = [one for one in fits.runs if one.name not in fits.later]
        print(slurm_script(now, now[0].folder.parent, fits.name), f"#{lines[-1]}\n", sep="", end="")
        if fits.later:
            waits = [f"{shell_words(name)} (starts from {shell_words(start)})" for name, start in fits.later.items()]
            print(f"# not in this array, call it again when the others stand: {', '.join(waits)}")
        return 0
    print(*lines, sep="\n", flush=True)
    if args.dry_run or not fits.runs:
        return 0
    outcomes: list[str] = []
    for number, one in enumerate(fits.runs, start=1):
        print(f"[{number}/{len(fits.runs)}] {one.name}", flush=True)
        outcomes.append(run_one(one))
        if outcomes[-1] == "interrupted":
            break
    print(*_table_lines(fits.runs[: len(outcomes)], outcomes), sep="\n")
    return INTERRUPTED if "interrupted" in outcomes else int(any(words.startswith("failed") for words in outcomes))


def _plan_lines(fits: Fits, price: float | None) -> list[str]:
    """Return each run's command and time, all needs, and what ``--slurm`` queues; refuse what can never train."""
    sources = [read_source(one.fit_arguments()[1:]) for one in fits.runs]
    quiet_libraries()
    from subtoken_train.cli.recipe import RecipeCLI
    from subtoken_train.cli.run_plan import added, on_gpus, plan_of_recipe

    head = f"{shell_words(fits.name)}: {len(fits.standing)} adapters exist, {len(fits.runs)} to train"
    head += f", not trained here but read from the Hub: {', '.join(fits.published)}" * bool(fits.published)
    if not fits.runs:
        return [f"{head}: nothing to do"]
    lines, each = [head], list["RunPlan"]()
    for one, source in zip(fits.runs, sources, strict=True):
        with at_place(f"{one.name}: "):
            cli = RecipeCLI(source)
            needs = plan_of_recipe(cli)
        if one.finished and read_recipe(one.folder / "recipe.yaml") != cli.resolved():
            raise ValueError(f"{one.folder} holds a finished run of another recipe; choose another --output_dir")
        each.append(needs)
        time = "" if needs.on_cpu or needs.flops is None else f"  # {on_gpus(needs.flops, gpus=['H100'])}"
        lines.append(f"{shell_words('subtoken-train', *one.fit_arguments())}{time}")
    lines += ["", "what they need (a prediction)", *(f"  {line}" for line in added(each).lines(price))]
    now = [needs for one, needs in zip(fits.runs, each, strict=True) if one.name not in fits.later]
    timed = [needs.flops for needs in now if needs.flops and not needs.on_cpu]
    queue = f"{len(now)} jobs in an array" + (f", the longest {on_gpus(max(timed), gpus=['H100'])}" if timed else "")
    queue += f"; {len(fits.later)} more when the runs that they start from stand" * bool(fits.later)
    return [*lines, f"  --slurm    {queue}"]


def run_one(one: SweepRun) -> str:
    """Train one run in a process of its own, resumed where it left a checkpoint; the outcome in words."""
    if one.finished:
        print(f"  finished before: {one.folder}")
        return "finished before"
    resume = [] if newest_complete(one.folder / "checkpoints") is None else ["--resume"]
    process = subprocess.Popen([sys.executable, "-m", "subtoken_train", *one.fit_arguments(), *resume])
    try:
        code = process.wait()
    except KeyboardInterrupt:  # the run got it too: it saves, then leaves
        process.wait()
        return "interrupted"
    return {0: "finished", INTERRUPTED: "interrupted"}.get(code, f"failed (exit code {code})")


def _table_lines(runs: list[SweepRun], outcomes: list[str]) -> list[str]:
    from subtoken_train.benchmarking.comparison import aligned_columns
    from subtoken_train.cli.fit_course import logged

    courses = [logged(one.folder) for one in runs]
    columns = [name for name in SCORES if any(name in course for course in courses)]
    rows = [["last values of run", "outcome", "step", *columns]]
    for one, words, course in zip(runs, outcomes, courses, strict=True):
        last = max((step for steps in course.values() for step in steps), default=None)
        cells = [f"{course[name][max(course[name])]:.4g}" if name in course else "" for name in columns]
        rows.append([plain(one.name), words, "" if last is None else str(last + 1), *cells])
    return aligned_columns(rows)


_UNSAFE = re.compile(r"[^A-Za-z0-9.,=+_\-]+")


def sweep_runs(configs: Sequence[str], settings: Sequence[str], folder: Path) -> list[SweepRun]:
    """List every combination of the settings' values (``KEY=A,B`` each), the last key changing fastest."""
    axes = dict[str, list[str]]()
    for setting in settings:
        key, values = parse_setting(setting)
        refuse((key in axes, f"--set {key} is given twice; write its values in one: --set {key}=A,B"))
        axes[key] = values
    leaves = [key.rpartition(".")[2] for key in axes]
    short = {key: leaf if leaves.count(leaf) == 1 else key for key, leaf in zip(axes, leaves, strict=True)}
    runs = dict[str, SweepRun]()
    for combination in product(*axes.values()):
        chosen = tuple(zip(axes, combination, strict=True))
        name = _UNSAFE.sub("_", ",".join(f"{short[key]}={value}" for key, value in chosen))
        if name in runs:
            why = "their values differ only in punctuation, or not at all"
            raise ValueError(f"two runs would share the folder {name}: {why}")
        runs[name] = SweepRun(name, folder / name, tuple(configs), chosen)
    return list(runs.values())


def parse_setting(setting: str) -> tuple[str, list[str]]:
    """Split ``KEY=A,B`` into the key and its values; commas inside brackets or braces separate nothing."""
    key, equals, text = setting.partition("=")
    key, values, depth = key.strip().removeprefix("--"), [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            values.append("")
        else:
            values[-1] += letter
    values = [value.strip() for value in values]
    if not equals or not key or not all(values):
        raise ValueError(f"--set {setting!r} must be KEY=VALUE,VALUE, for instance model.routing.kept_groups=2,4,8")
    if key in ("output_dir", *FLAGS):
        raise ValueError(f"--set {key}: a sweep sets it for every run itself; --output_dir DIR moves all of them")
    return key, values


def slurm_script(runs: Sequence[SweepRun], folder: Path, name: str) -> str:
    """Write an sbatch script whose array has one task per run; partition, GPUs and time are the user's to add."""
    commands = (shell_words("subtoken-train", *one.fit_arguments()) for one in runs)
    tasks = "\n".join(f"  {number}) exec srun {command} ;;" for number, command in enumerate(commands))
    place, log = shell_words(folder), shell_words(folder / "slurm-%A_%a.log")
    if log.startswith("$"):
        raise ValueError(f"the runs' folder {str(folder)!r} has a control character, which no #SBATCH line takes")
    return f"""#!/bin/bash
#SBATCH --job-name={_UNSAFE.sub("_", name)}
#SBATCH --array=0-{len(runs) - 1}
#SBATCH --output={log}
# Add --partition, --gpus-per-node, --ntasks-per-node (one per GPU) and --time for your cluster.
# Before sbatch: mkdir -p {place}
case "$SLURM_ARRAY_TASK_ID" in
{tasks}
esac
"""


def grid_fits(given: str) -> Fits:
    """Return the fits of a grid's arms, read from its file alone."""
    from subtoken_train.evaluation.runner.spec import read_grid

    path = named_recipe(given, "grid")
    fits = Fits(path.stem)
    for adapter in dict.fromkeys(str(arm.adapter) for arm in read_grid(path).arms if arm.adapter is not None):
        _add(fits, adapter, f"grid {path.stem}")
    return fits


def _add(fits: Fits, adapter: str, asker: str) -> SweepRun | None:
    """Add the run that makes an adapter, after the runs that it starts from; None: it stands, or is published."""
    from subtoken_train.artifact.hub import adapter_in
    from subtoken_train.cli.recipes import SUFFIX, anchor_words
    from subtoken_train.evaluation.runner.dry_run import recipe_of
    from subtoken_train.families.backbone_config import is_hub_id, resolve

    folder = Path(adapter).parent if Path(adapter).name == "adapter" else Path(adapter)
    known = next((run for run in fits.runs if run.folder == folder), None)
    if known is not None or adapter in (*fits.standing, *fits.published):
        return known
    if adapter_in(Path(resolve(adapter))) is not None:
        fits.standing.append(adapter)
        return None
    recipe, overrides = recipe_of(adapter), list[tuple[str, str]]()
    if recipe is None and (recipe := recipe_of(str(folder.with_name(folder.name.removesuffix(SUFFIX))))) is not None:
        words = (word.removeprefix("--").split("=", 1) for word in anchor_words(["--config", str(recipe)])[2:])
        overrides = [(key, value) for key, value in words if key != "output_dir"]
    if recipe is None and is_hub_id(adapter) and not Path(adapter).parent.is_dir():
        fits.published.append(adapter)
        return None
    if recipe is None:
        needed = f"{asker} needs the adapter {adapter}, which is not here and which no recipe makes: there is no"
        where = f"{folder.name}.yaml here or in recipes/, and none ships; write that recipe, or take the arm out"
        raise ValueError(f"{needed} {where}")
    start: Any = (read_recipe(recipe).get("model") or {}).get("stage2") or {}
    first = _add(fits, str(start["adapter"]), f"recipe {recipe.stem}") if "adapter" in start else None
    config = recipe.stem if recipe.is_absolute() else str(recipe)  # a shipped one by its name
    fits.runs.append(run := SweepRun(folder.name, folder, (config,), tuple(overrides)))
    if first is not None:
        fits.later[run.name] = first.name
    return run
