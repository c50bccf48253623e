"""Loggers of a run: CSV, TensorBoard where it is installed, and what the recipe names (``recipes/logging/``)."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info

from subtoken_train.cli.trainer_parts import KINDS, build_parts, named_parts
from subtoken_train.documents import check_regular
from subtoken_train.errors import check_package

FOLDER = "logs"
OVERVIEW = ("train/loss", "val/loss", "eval/accuracy", "val/token_accuracy")
_LAST = {"epoch": 3, "weight_norm": 3, "gradient_norm": 4}


def tensorboard_tag(name: str) -> str:
    """A metric's name as TensorBoard's first page wants it, which sorts tags and opens the first two groups alone."""
    return f"1_overview/{name}" if name in OVERVIEW else f"{_LAST.get(name.partition('/')[0], 2)}_{name}"


class SortedTensorBoard(TensorBoardLogger):
    """TensorBoard's log, under tags that sort by what is looked at first; other loggers have the plain names."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log under ``tensorboard_tag``."""
        super().log_metrics({tensorboard_tag(name): value for name, value in metrics.items()}, step)


def run_loggers(given: Any, folder: Path, anew: bool) -> list[Logger]:
    """Loggers that write below ``folder``/logs, and the given ones (``trainer.logger``; False for none at all).

    A later part of a run must not delete the CSV log of its first: it gets ``csv-2``, ``csv-3``... unless the run
    begins ``anew``, and what lies there will have been renamed.
    """
    if given is False:
        return []
    names = (f"csv-{number}" if number > 1 else "csv" for number in count(1))
    part = next(name for name in names if anew or not (folder / FOLDER / name).exists())
    ours: list[Logger] = [CSVLogger(str(folder), FOLDER, part)]
    try:
        check_package("tensorboard", "tensorboard", f"TensorBoard's log, beside {folder / FOLDER / part},")
    except ValueError as missing:
        rank_zero_info(f"left out: {missing}")
    else:
        ours.append(SortedTensorBoard(str(folder), FOLDER, "tb", default_hp_metric=False))
    remote = {"wandb": {"name": folder.name, "save_dir": str(folder / FOLDER)}, "mlflow": {"run_name": folder.name}}
    return [*ours, *build_parts("logger", given, **remote)]


def check_remote(given: Any) -> None:
    """Raise a worded ``ValueError`` where ``trainer.logger`` names a service whose package is not installed."""
    for kind, _ in named_parts("logger", given):
        if kind in KINDS["logger"].names.builtin and find_spec(kind) is None:
            raise ValueError(f"trainer.logger {kind} needs the package {kind}; 'pip install {kind}' adds it")


def csv_parts(folder: Path) -> list[Path]:
    """The CSV logs of a run, from its first part to its last resume."""
    found = (folder / FOLDER).glob("csv*/metrics.csv")
    return sorted(found, key=lambda path: int(path.parent.name.removeprefix("csv").lstrip("-") or 1))


def logged(folder: Path) -> dict[str, dict[int, float]]:
    """Metric -> step -> value, over all parts of a run; where two parts made a step, the later one's."""
    course: dict[str, dict[int, float]] = {}
    for part in csv_parts(folder):
        check_regular(part)
        with part.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                for name, value in row.items():
                    if value and name != "step":
                        course.setdefault(name, {})[int(row["step"])] = float(value)
    return course
