"""What ``fit`` asks of an earlier run: what one that goes may not hold, and what a resumed one may change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from subtoken_train.artifact.whole_folder import RECIPE_FILE
from subtoken_train.cli.recipe_source import read_recipe
from subtoken_train.documents import real_path
from subtoken_train.errors import UncutError
from subtoken_train.resources import find_recipe


def check_held(cli: Any) -> None:
    """Refuse to replace a folder (with ``--overwrite`` alone) that holds what the run reads.

    Raises:
        ValueError: data, images, backbone, stage 1's adapter or a recipe lies in the run's folder. The run's own
            ``recipe.yaml`` may.
    """
    folder: Path = cli.output_dir
    if cli.place == folder:
        return
    for key, text in _texts({"data": cli.config.data.as_dict(), "model": cli.config.model.as_dict()}, ""):
        if _lies_in(Path(text), folder):
            raise ValueError(
                f"{key} ({text}) lies in {folder}, which this run would replace; choose another --output_dir"
            )
    for path in filter(None, map(find_recipe, cli.source.words.configs)):
        if _lies_in(path, folder) and real_path(path) != real_path(folder / RECIPE_FILE):
            raise ValueError(f"the recipe {path} lies in {folder}, which this run would replace; move it elsewhere")


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Every text in nested settings, with its dotted key; any of them may name a file."""
    if isinstance(value, str | Path):
        yield key, str(value)
    elif isinstance(value, dict):
        for name, below in value.items():
            yield from _texts(below, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list | tuple):
        for below in value:
            yield from _texts(below, key)


def _lies_in(path: Path, folder: Path) -> bool:
    try:
        return path.absolute().is_relative_to(folder.absolute()) or real_path(path).is_relative_to(real_path(folder))
    except (OSError, ValueError):  # a text that is no path: too long, or with a null byte
        return False


# A checkpoint restores or presupposes these; others (devices, loggers, workers, intervals) may change freely.
_DECISIVE = (
    "seed_everything",
    "model.",
    "data.",
    "trainer.precision",
    "trainer.accumulate_grad_batches",
    "trainer.gradient_clip_val",
    "trainer.gradient_clip_algorithm",
    "trainer.limit_train_batches",
)

# Files may have moved, memory may be saved; the order of the data refuses a batch that is not the same in total.
_FREE_LEAVES = ("path", "num_workers", "batch_size", "val_batch_size", "gradient_checkpointing")
_FREE_ENDINGS = ("_file", "_root", "_folder", "_dir")
_NOTED = ("trainer.max_steps", "trainer.max_epochs")
_MISSING = object()
_MAX_LISTED = 4


def compare_recipes(saved: Path, now: str) -> str:
    """Compare the recipe that a run keeps with the present one; returns a note on what may change but matters.

    Raises:
        ValueError: they differ in what the checkpoint restores or presupposes, or the saved one cannot be read.
    """
    before, after = dict(_flat(read_recipe(saved))), dict(_flat(yaml.safe_load(now)))
    differing = [key for key in sorted(before.keys() | after.keys()) if before.get(key) != after.get(key)]
    decisive = [key for key in differing if _is_decisive(key) and before.get(key, _MISSING) is not _MISSING]
    if decisive:
        listed = "; ".join(_change(key, before, after) for key in decisive[:_MAX_LISTED])
        more = f"; and {len(decisive) - _MAX_LISTED} more" if len(decisive) > _MAX_LISTED else ""
        raise UncutError(f"the run began with another recipe ({listed}{more}); resume with {saved}, or start anew")
    return "; ".join(_change(key, before, after) for key in differing if key in _NOTED)


def _change(key: str, before: dict[str, Any], after: dict[str, Any]) -> str:
    return f"{key}: {before.get(key)}, here {after.get(key)}"


def _is_decisive(key: str) -> bool:
    leaf = key.rpartition(".")[2]
    return key.startswith(_DECISIVE) and leaf not in _FREE_LEAVES and not leaf.endswith(_FREE_ENDINGS)


def _flat(content: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf, and ``set`` for every group: where it is off, its name holds null."""
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield prefix + key, "set"
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
