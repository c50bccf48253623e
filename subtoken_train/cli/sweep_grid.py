"""The runs of a sweep: which overrides, in which folder, by which command; what each has left so far."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from subtoken_train.cli.command_line import ALLOW_CODE, FLAGS

_UNSAFE = re.compile(r"[^A-Za-z0-9.,=+_\-]+")
_RESERVED = ("output_dir", *FLAGS)


@dataclass(frozen=True)
class SweepRun:
    """One combination.

    Attributes:
        name: the overrides in short, ``kept_groups=2,learning_rate=1e-4``; the folder's name too.
        folder: the run's own.
        configs: recipe files.
        overrides: (key, value) as written.
        allow_code: whether ``--allow-code`` goes with them.
    """

    name: str
    folder: Path
    configs: tuple[str, ...]
    overrides: tuple[tuple[str, str], ...]
    allow_code: bool = False

    def fit_arguments(self) -> list[str]:
        """``fit --config ... --KEY=VALUE ... --output_dir=...``."""
        configs = [word for path in self.configs for word in ("--config", path)]
        overrides = [f"--{key}={value}" for key, value in self.overrides]
        code = [ALLOW_CODE] if self.allow_code else []
        return ["fit", *configs, *overrides, f"--output_dir={self.folder}", *code]

    @property
    def finished(self) -> bool:
        """Whether the run has left its adapter, which is written last."""
        return (self.folder / "adapter" / "subtoken_config.json").is_file()

    @property
    def resumable(self) -> bool:
        """Whether the run stopped after a checkpoint."""
        from subtoken_train.training.checkpoints import newest_complete

        return newest_complete(self.folder / "checkpoints") is not None

    def last_metrics(self, names: Sequence[str]) -> dict[str, float]:
        """The last value of each metric in the run's CSV logs, and the last ``step``; without what was never logged."""
        from subtoken_train.cli.loggers import logged

        courses = logged(self.folder)
        steps = {step for course in courses.values() for step in course}
        last = {name: courses[name][max(courses[name])] for name in names if name in courses}
        return {**last, "step": float(max(steps))} if steps else last


def sweep_runs(
    configs: Sequence[str], settings: Sequence[str], folder: Path, allow_code: bool = False
) -> list[SweepRun]:
    """Every combination of the settings' values (``KEY=A,B`` each), the last key changing fastest.

    Raises:
        ValueError: a setting without a value, a key that is given twice, or one that the sweep sets itself.
    """
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
                f"two runs would share the folder {name}: their values differ in signs alone, or not at all"
            )
        runs.append(SweepRun(name, folder / name, tuple(configs), chosen, allow_code))
    return runs


def parse_setting(setting: str) -> tuple[str, list[str]]:
    """``KEY=A,B`` as the key and its values; commas inside brackets or braces separate nothing.

    Raises:
        ValueError: no key, no value or an empty one, or a key that the sweep sets itself.
    """
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


def slurm_script(runs: Sequence[SweepRun], folder: Path) -> str:
    """An sbatch script whose array has one task per run; partition, GPUs and time are the user's to add."""
    tasks = "\n".join(
        f"  {number}) exec srun {shlex.join(['subtoken-train', *one.fit_arguments()])} ;;"
        for number, one in enumerate(runs)
    )
    log = folder / "slurm-%A_%a.log"
    return f"""#!/bin/bash
#SBATCH --job-name={_UNSAFE.sub("_", folder.name)}
#SBATCH --array=0-{len(runs) - 1}
#SBATCH --output={log}
# Add --partition, --gpus-per-node, --ntasks-per-node (one per GPU) and --time for your cluster.
# {folder} must exist before sbatch: mkdir -p {shlex.quote(str(folder))}
case "$SLURM_ARRAY_TASK_ID" in
{tasks}
esac
"""


def _short_names(keys: list[str]) -> dict[str, str]:
    """The last word of each key, or all of it where two keys end alike."""
    leaves = [key.rpartition(".")[2] for key in keys]
    return {key: leaf if leaves.count(leaf) == 1 else key for key, leaf in zip(keys, leaves, strict=True)}
