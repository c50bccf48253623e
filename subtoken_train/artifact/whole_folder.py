"""Folders that are whole or not there."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONFIG_FILE = "subtoken_config.json"
"""What makes a folder an adapter folder."""


def check_target(folder: Path, overwrite: bool) -> None:
    """Raise a worded ``ValueError`` unless ``folder`` may be written: new, or an adapter folder to be replaced."""
    if not folder.exists():
        return
    if not overwrite:
        raise ValueError(f"{folder} exists; choose another folder or pass --overwrite")
    if not (folder / CONFIG_FILE).is_file():
        raise ValueError(f"{folder} is not an adapter folder (no {CONFIG_FILE}), so it is not replaced; choose another")


@contextmanager
def whole_folder(folder: Path, overwrite: bool) -> Iterator[Path]:
    """A temporary sibling to write into, which takes ``folder``'s name at the end, or vanishes after an error.

    Raises:
        ValueError: see ``check_target``.
    """
    check_target(folder, overwrite)
    temporary, old = (folder.with_name(folder.name + ending) for ending in (".partial", ".replaced"))
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
    except BaseException:
        shutil.rmtree(temporary)
        raise
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
