"""Read a grid file (``recipes/eval/*.yaml``), strictly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from subtoken_train.documents import read_yaml
from subtoken_train.errors import unknown_name
from subtoken_train.evaluation.runner.spec import ArmSpec, Grid, TaskSpec, expand_arms

_TYPES = {"limit": int, "batch_size": int, "max_length": int, "anchors": str, "data_root": str}


def read_grid(path: Path, **overrides: Any) -> Grid:
    """A grid with some of its settings replaced.

    Args:
        path: YAML with ``arms``, ``tasks``, ``out`` and, optionally, the other attributes of ``Grid``.
        overrides: attributes of ``Grid``; None leaves the file's.

    Raises:
        ValueError: no such file, no YAML, or keys or values that a grid does not have.
    """
    if not path.is_file():
        raise ValueError(f"grid {path} is not a file; recipes/eval holds some")
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} must be a mapping with arms, tasks and out")
    known = {spec.name for spec in fields(Grid)}
    for key in content:
        if key not in known:
            raise unknown_name(f"key of {path}", key, known)
    for key in ("arms", "tasks"):
        if not isinstance(content.get(key), list):
            raise ValueError(f"{path}: {key} must be a list; got {content.get(key)!r}")
    if not isinstance(content.get("out"), str) or not content["out"]:
        raise ValueError(f"{path}: out must name the results folder; got {content.get('out')!r}")
    settings = {key: _typed(path, key, content[key]) for key in _TYPES if content.get(key) is not None}
    if "data_root" in settings:
        settings["data_root"] = Path(settings["data_root"])
    grid = Grid(
        arms=tuple(arm for entry in content["arms"] for arm in _arms(path, entry)),
        tasks=tuple(_task(path, entry) for entry in content["tasks"]),
        out=Path(content["out"]),
        **settings,
    )
    return replace(grid, **{key: value for key, value in overrides.items() if value is not None})


def _typed(path: Path, key: str, value: object) -> Any:
    if not isinstance(value, _TYPES[key]) or isinstance(value, bool):
        kind = "a whole number" if _TYPES[key] is int else "text"
        raise ValueError(f"{path}: {key} must be {kind}; got {value!r}")
    return value


def _arms(path: Path, entry: object) -> list[ArmSpec]:
    if not isinstance(entry, Mapping):
        raise ValueError(f"{path}: an arm must be a mapping, for instance {{adapter: DIR}}; got {entry!r}")
    try:
        return expand_arms(entry)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _task(path: Path, entry: object) -> TaskSpec:
    if isinstance(entry, str):
        return TaskSpec(entry)
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        raise ValueError(f"{path}: a task is a name or {{name: NAME, option: value}}; got {entry!r}")
    source = entry.get("source")
    if source is not None and not isinstance(source, str):
        raise ValueError(f"{path}: source of task {entry['name']} must be a folder or a Hub id; got {source!r}")
    options = {key: value for key, value in entry.items() if key not in ("name", "source")}
    return TaskSpec(entry["name"], source, options)
