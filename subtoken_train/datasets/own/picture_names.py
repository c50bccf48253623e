"""The files that records mean when they name images, and whether these are images at all."""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath

from subtoken_train.datasets.image_sources import inside, open_image
from subtoken_train.datasets.own.folder_scan import OwnFolder
from subtoken_train.datasets.own.question_table import OwnRecord
from subtoken_train.datasets.record_format import image_names
from subtoken_train.datasets.unknown_tokens import spread
from subtoken_train.documents import check_regular

_BLOCK = 2**20


class PictureNames:
    """Finds the images of a folder by what a table calls them.

    A name is a path from the folder or from the table, or the one image that has this file name, with its suffix or
    without, in folders that do not contradict those of the name.

    Args:
        own: the folder.
        table: the table's path below it.
    """

    def __init__(self, own: OwnFolder, table: str) -> None:
        self._own, self._beside = own, PurePosixPath(table).parent
        self._there = set(own.images)
        self._by_name: dict[str, list[str]] = defaultdict(list)
        for name in own.images:
            path = PurePosixPath(name)
            for called in {path.name, path.stem}:
                self._by_name[called].append(name)

    def placed(self, record: OwnRecord) -> OwnRecord:
        """The record with the paths of its images from the folder; an image that is not found keeps its name.

        Raises:
            ValueError: a name leads out of the folder, or could mean several images.
        """
        names = image_names(record.row)
        if not names:
            return record
        found = [self._path(name, record.place) for name in names]
        return OwnRecord({**record.row, "image": found[0] if len(found) == 1 else found}, record.place)

    def missing(self, records: Iterable[OwnRecord]) -> list[tuple[str, str]]:
        """(name, place) of the images of placed records that are not there."""
        return [(name, each.place) for each in records for name in image_names(each.row) if name not in self._there]

    def _path(self, name: str, place: str) -> str:
        folder, beside = self._own.path, self._beside
        if os.path.isabs(name):
            name = os.path.relpath(name, os.path.abspath(folder))
        for start in (PurePosixPath(), beside):
            path = os.path.normpath(start / name)
            if path in self._there:
                return _within(folder, path, place)
        _within(folder, os.path.normpath(beside / name), place)
        called = [path for path in self._by_name.get(PurePosixPath(name).name, []) if _may_be(name, path)]
        if len(called) > 1:
            raise ValueError(f"{place}: image {name[:80]!r} could be {called[0]} or {called[1]}; write its path")
        return _within(folder, called[0], place) if called else name


def _may_be(name: str, path: str) -> bool:
    """Whether the folders of a name are the last ones of a path, or the other way round: ``train/`` is not ``val/``."""
    given, there = (PurePosixPath(os.path.normpath(each)).parts[-2::-1] for each in (name, path))
    return all(one == other for one, other in zip(given, there, strict=False))


def _within(folder: Path, name: str, place: str) -> str:
    try:
        inside(folder, name)
    except ValueError:
        raise ValueError(
            f"{place}: image {name[:80]!r} lies outside of {folder} (a path or a link); copy it in"
        ) from None
    return name


def check_pictures(folder: Path, names: list[str], show: Callable[[int, int], None]) -> int:
    """Open images, evenly spread where there are many; returns how many.

    Raises:
        ValueError: one is no image that can be read, or too large.
    """
    some = spread(len(names))
    for done, place in enumerate(some, 1):
        open_image(folder / names[place])
        show(done, len(some))
    return len(some)


def same_pictures(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """For each image the name of the first that has the very same bytes; only files of equal sizes are read."""
    by_size: dict[int, list[str]] = defaultdict(list)
    for name in sorted(set(names)):
        by_size[(folder / name).stat().st_size].append(name)
    first = {}
    for alike in by_size.values():
        seen: dict[bytes, str] = {}
        for name in alike:
            first[name] = name if len(alike) == 1 else seen.setdefault(_digest(folder / name), name)
    return first


def _digest(path: Path) -> bytes:
    digest = hashlib.sha256()
    check_regular(path)
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.digest()
