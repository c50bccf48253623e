"""What a folder that this program writes is made of: nothing else in it is ever removed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NAMED = 3  # names in a message


@dataclass(frozen=True)
class Layout:
    """The files and folders of one kind of folder, by their paths in it (``/`` between the parts).

    Attributes:
        files: matches the whole path of every file (or symbolic link) that is ours.
        folders: the same for folders; what lies in another folder is not looked at and not ours.
        last: the file that is removed last: what says that the folder is ours.
    """

    files: re.Pattern[str]
    folders: re.Pattern[str]
    last: str

    def others(self, root: Path) -> list[Path]:
        """What in ``root`` is not ours: files, and folders as a whole."""
        return [item for item, ours in self._sorted(root, root) if not ours]

    def remove(self, root: Path) -> list[Path]:
        """Remove what is ours, and the folders that it leaves empty, ``root`` too; returns what stays.

        Symbolic links are removed themselves, never what they point to.
        """
        found = list(self._sorted(root, root))
        last = root / self.last
        for item, ours in found:
            if ours and item != last:
                item.unlink()
        for folder in self._folders(root, root):
            _remove_if_empty(folder)
        if [item for item in root.iterdir() if item != last] == []:
            last.unlink(missing_ok=True)
            root.rmdir()
        return [item for item, ours in found if not ours]

    def _sorted(self, folder: Path, root: Path) -> Iterator[tuple[Path, bool]]:
        for item in sorted(folder.iterdir()):
            name = item.relative_to(root).as_posix()
            if item.is_symlink() or not item.is_dir():
                yield item, self.files.fullmatch(name) is not None
            elif self.folders.fullmatch(name):
                yield from self._sorted(item, root)
            else:
                yield item, False

    def _folders(self, folder: Path, root: Path) -> Iterator[Path]:
        """Our folders, inner ones first."""
        for item in sorted(folder.iterdir()):
            if item.is_dir() and not item.is_symlink() and self.folders.fullmatch(item.relative_to(root).as_posix()):
                yield from self._folders(item, root)
                yield item


def names_of(items: list[Path], root: Path) -> str:
    """The first few of them in words, as paths in ``root``."""
    shown = ", ".join(item.relative_to(root).as_posix() for item in items[:_NAMED])
    return shown if len(items) <= _NAMED else f"{shown} and {len(items) - _NAMED:,} more"


def make_folder(folder: Path) -> list[Path]:
    """Make a new folder and its parents; returns those that were made, inner ones first.

    Raises:
        FileExistsError: it is there.
    """
    missing = [folder, *(parent for parent in folder.parents if not parent.exists())]
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir()
    return missing


def unmake_folders(made: list[Path]) -> None:
    """Remove the folders that ``make_folder`` made, as far as they are empty."""
    for folder in made:
        if folder.is_dir():
            _remove_if_empty(folder)


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_if_empty(folder: Path) -> None:
    if not any(folder.iterdir()):
        folder.rmdir()
