"""Loggers of a run: CSV, TensorBoard where it is installed, and what the recipe names (``recipes/logging/``)."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info

from subtoken_train.documents import check_regular
from subtoken_train.errors import check_package

FOLDER = "logs"
_REMOTE = {"WandbLogger": ("wandb", "name"), "MLFlowLogger": ("mlflow", "run_name")}
"""Lightning's class -> (the package it needs, its key for the run's name)."""
OVERVIEW = (
    "train/loss",
    "val/loss",
    "eval/accuracy",
    "val/token_accuracy",
)
_LAST = {"epoch": 3, "weight_norm": 3, "gradient_norm": 4}


def tensorboard_tag(name: str) -> str:
    """A metric's name as TensorBoard's first page wants it, which sorts tags and opens the first two groups alone.

    Loss and accuracy come first, in one group; the budget, which hardly moves, is in the next ones, gradients are last.
    """
    return f"1_overview/{name}" if name in OVERVIEW else f"{_LAST.get(name.partition('/')[0], 2)}_{name}"


class SortedTensorBoard(TensorBoardLogger):
    """TensorBoard's log, under tags that sort by what is looked at first; other loggers have the plain names."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log under ``tensorboard_tag``."""
        super().log_metrics({tensorboard_tag(name): value for name, value in metrics.items()}, step)


def run_loggers(given: Any, folder: Path) -> list[Logger]:
    """Loggers that write below ``folder``/logs, and the given ones.

    Args:
        given: ``trainer.logger``: one logger, several, None or True for ours alone, False for none at all.
        folder: the run's folder. A later part of a run must not delete the CSV log of its first: it gets ``csv-2``,
            ``csv-3``...
    """
    if given is False:
        return []
    names = (f"csv-{number}" if number > 1 else "csv" for number in count(1))
    part = next(name for name in names if not (folder / FOLDER / name).exists())
    ours: list[Logger] = [CSVLogger(str(folder), FOLDER, part)]
    try:
        check_package("tensorboard", "tensorboard", f"TensorBoard's log, beside {folder / FOLDER / part},")
    except ValueError as missing:
        rank_zero_info(f"left out: {missing}")
    else:
        ours.append(SortedTensorBoard(str(folder), FOLDER, "tb", default_hp_metric=False))
    if given in (None, True):
        return ours
    return [*ours, *(given if isinstance(given, Iterable) else [given])]


def csv_parts(folder: Path) -> list[Path]:
    """The CSV logs of a run, from its first part to its last resume."""
    found = (folder / FOLDER).glob("csv*/metrics.csv")
    return sorted(found, key=lambda path: int(path.parent.name.removeprefix("csv").lstrip("-") or 1))


def logged(folder: Path) -> dict[str, dict[int, float]]:
    """Metric -> step -> value, over all parts of a run; where two parts made a step, the later one's.

    Raises:
        ValueError: a log with something else than numbers.
    """
    course: dict[str, dict[int, float]] = {}
    for part in csv_parts(folder):
        check_regular(part)
        with part.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                for name, value in row.items():
                    if value and name != "step":
                        course.setdefault(name, {})[int(row["step"])] = float(value)
    return course


def name_remote_runs(given: Any, name: str, folder: Path) -> None:
    """Name W&B's and MLflow's runs as the run, and keep W&B's files in its folder; what a recipe says itself stays.

    ``given`` is ``trainer.logger`` as it is parsed, before anything is built; it is changed in place.

    Raises:
        ValueError: the logger's package is not installed.
    """
    for entry in given if isinstance(given, list) else [given]:
        kind = str(getattr(entry, "class_path", "")).rpartition(".")[2]
        if kind == "TensorBoardLogger":
            check_package("tensorboard", "tensorboard", "trainer.logger TensorBoardLogger")
        if kind not in _REMOTE:
            continue
        package, name_key = _REMOTE[kind]
        if find_spec(package) is None:
            raise ValueError(f"trainer.logger {kind} needs the package {package}; 'pip install {package}' adds it")
        settings = entry.init_args
        if settings.get(name_key) is None:
            settings[name_key] = name
        if kind == "WandbLogger" and str(settings.get("save_dir")) == ".":
            settings["save_dir"] = str(folder / FOLDER)


def finish_remote(loggers: Iterable[Any]) -> None:
    """Let W&B write its last files now; else it does when Python ends, into a folder that has another name by then."""
    for logger in loggers:
        run = getattr(logger, "_experiment", None)  # asked for by its public name, it would be started
        if type(logger).__name__ == "WandbLogger" and run is not None:
            run.finish()
