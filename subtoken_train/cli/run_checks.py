"""What a run that replaces another one must not touch: the files that it reads itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from subtoken_train.resources import find_recipe


def check_held(cli: Any) -> None:
    """Refuse to replace a folder that holds what the run reads.

    Args:
        cli: the parsed recipe; only ``--overwrite`` replaces anything.

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
        if _lies_in(path, folder) and path.resolve() != (folder / "recipe.yaml").resolve():
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
        return path.absolute().is_relative_to(folder.absolute()) or path.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError):  # a text that is no path: too long, or with a null byte
        return False
