"""What lies in a folder of one's own data: images, tables, texts, by their names alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from subtoken_train.datasets.image_sources import PICTURE_SUFFIXES

TABLES = (".csv", ".tsv", ".json", ".jsonl")
TEXTS = (".txt", ".md")
MAX_FILES = 2_000_000
_ABOUT_IT = ("readme", "license", "licence", "notice", "copying", "changelog", "dataset_info", "dataset_infos")
"""Files about a data set, which are none of it: texts and tables beside it, not in the folders below."""


@dataclass(frozen=True)
class OwnFolder:
    """The files of a folder and of those below it, as paths relative to it, sorted.

    Attributes:
        path: the folder.
        images: by their suffix; none is opened.
        tables: CSV, TSV, JSON and JSON lines.
        texts: plain text.
        left_out: texts and tables that tell about the data.
    """

    path: Path
    images: tuple[str, ...]
    tables: tuple[str, ...]
    texts: tuple[str, ...]
    left_out: tuple[str, ...]


def look_into(folder: Path) -> OwnFolder:
    """List a folder; hidden files, and texts and tables that tell about the data (README, LICENSE), are left out.

    Raises:
        ValueError: it is no folder, holds nothing that could be data, or too much.
        OSError: it, or a folder in it, cannot be read.
    """
    if not folder.exists():
        raise ValueError(f"{folder} does not exist; name the folder of your data")
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; name the folder that holds it, and the file with --table")
    found: dict[str, list[str]] = {}
    left_out = []
    for number, name in enumerate(_names(folder)):
        if number >= MAX_FILES:
            raise ValueError(f"{folder} holds more than {MAX_FILES:,} files; name a folder that holds the data alone")
        stem, suffix = map(str.lower, os.path.splitext(name))
        if suffix in (*TABLES, *TEXTS) and stem in _ABOUT_IT:  # a path from below the folder is no such name
            left_out.append(name)
        else:
            found.setdefault(suffix, []).append(name)
    kinds_of_files = (PICTURE_SUFFIXES, TABLES, TEXTS)
    images, tables, texts = (
        tuple(sorted(name for suffix in kinds for name in found.get(suffix, ()))) for kinds in kinds_of_files
    )
    if not (images or tables or texts):
        kinds = ", ".join((*TABLES, *TEXTS))
        beside = f" (but {', '.join(sorted(left_out))}, about the data)" if left_out else ""
        raise ValueError(f"{folder} holds no data: no images, and no file that ends with one of {kinds}{beside}")
    return OwnFolder(folder, images, tables, texts, tuple(sorted(left_out)))


def _names(folder: Path) -> Iterator[str]:
    for place, folders, names in os.walk(folder, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith((".", "__"))]
        below = os.path.relpath(place, folder)
        for name in names:
            if not name.startswith("."):
                yield Path(below, name).as_posix()


def _refuse(error: OSError) -> None:
    raise error
