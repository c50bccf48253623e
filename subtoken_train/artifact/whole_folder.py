"""Folders that are whole or not there: an old one keeps its files under another name, and nothing is deleted."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from subtoken_train.documents import read_json
from subtoken_train.outputs import check_place, stage

CONFIG_FILE = "subtoken_config.json"  # marks an adapter folder
RECIPE_FILE = "recipe.yaml"  # in an adapter's folder and in a run's
PICTURE_FILE = "training.png"  # in an adapter's folder: the course of its training
DATA_MARKER = ".subtoken-data.json"  # marks a data set that ``data`` or ``init`` wrote; those of version 0.1 have none


@dataclass(frozen=True)
class FolderKind:
    """A kind of folder that may be replaced: in words, with its article; the command that its marker names, if any."""

    words: str
    made_by: str | None = None
    marker: str = DATA_MARKER

    def is_kind(self, folder: Path) -> bool:
        """Tell whether a folder has the marker of this kind."""
        try:
            content = read_json(folder / self.marker) if self.made_by else None
        except (ValueError, OSError):
            return False
        made = content.get("made_by") if isinstance(content, dict) else None
        return (folder / self.marker).is_file() and made == self.made_by


ADAPTER = FolderKind("an adapter folder", marker=CONFIG_FILE)  # an adapter folder, or one with merged weights


def check_target(folder: Path, overwrite: bool, kind: FolderKind = ADAPTER) -> None:
    """Raise ``ValueError`` unless ``folder`` may be written: new, or one of its kind that may be renamed."""
    if not os.path.lexists(folder):
        check_place(folder)
        return
    if not overwrite:
        raise ValueError(f"{folder} exists; choose another folder or pass --overwrite")
    if folder.is_symlink():
        raise ValueError(f"{folder} is a symbolic link, which is not replaced; name the folder itself, or another")
    if not kind.is_kind(folder):
        by = f" of {kind.made_by!r}" if kind.made_by else ""
        raise ValueError(f"{folder} is not {kind.words} (no {kind.marker}{by}), so it is not replaced; choose another")


@contextmanager
def whole_folder(folder: Path, overwrite: bool, kind: FolderKind = ADAPTER) -> Iterator[Path]:
    """Yield a new folder to write into, which takes ``folder``'s name at the end, or vanishes after an error.

    What has that name until then is renamed to ``free_name``; a data set is marked with the command that made it.
    """
    check_target(folder, overwrite, kind)
    with stage(folder) as temporary:
        temporary.mkdir()
        yield temporary
        if kind.made_by:
            (temporary / kind.marker).write_text(json.dumps({"made_by": kind.made_by}) + "\n", encoding="utf-8")
        check_target(folder, overwrite, kind)  # again: hours may have passed
        if folder.exists():
            folder.rename(free_name(folder))
        temporary.rename(folder)


def free_name(folder: Path) -> Path:
    """Return ``NAME.1`` beside a folder, or the next number whose name is free."""
    names = (folder.with_name(f"{folder.name}.{number}") for number in count(1))
    return next(name for name in names if not os.path.lexists(name))
