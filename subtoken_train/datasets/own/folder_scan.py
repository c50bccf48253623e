"""What lies in a folder of one's own data: images, tables, texts, by their names alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

IMAGES = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".avif", ".jp2")
TABLES = (".csv", ".tsv", ".json", ".jsonl")
TEXTS = (".txt", ".md")
MAX_FILES = 2_000_000
_ABOUT_IT = ("readme", "license", "licence", "notice", "copying", "changelog", "dataset_info", "dataset_infos")
"""Files about a data set, which are none of it."""


@dataclass(frozen=True)
class OwnFolder:
    """The files of a folder and of those below it, as paths relative to it, sorted.

    Attributes:
        path: the folder.
        images: by their suffix; none is opened.
        tables: CSV, TSV, JSON and JSON lines.
        texts: plain text.
    """

    path: Path
    images: tuple[str, ...]
    tables: tuple[str, ...]
    texts: tuple[str, ...]


def look_into(folder: Path) -> OwnFolder:
    """List a folder; hidden files and those that tell about the data (README, LICENSE) are left out.

    Raises:
        ValueError: it is no folder, holds nothing that could be data, or too much.
        OSError: it, or a folder in it, cannot be read.
    """
    if not folder.exists():
        raise ValueError(f"{folder} does not exist; name the folder of your data")
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; name the folder that holds it, and the file with --table")
    found: dict[str, list[str]] = {}
    for number, name in enumerate(_names(folder)):
        if number >= MAX_FILES:
            raise ValueError(f"{folder} holds more than {MAX_FILES:,} files; name a folder that holds the data alone")
        found.setdefault(os.path.splitext(name)[1].lower(), []).append(name)
    images, tables, texts = (
        tuple(sorted(name for suffix in kinds for name in found.get(suffix, ()))) for kinds in (IMAGES, TABLES, TEXTS)
    )
    if not (images or tables or texts):
        kinds = ", ".join((*TABLES, *TEXTS))
        raise ValueError(f"{folder} holds no data: no images, and no file that ends with one of {kinds}")
    return OwnFolder(folder, images, tables, texts)


def _names(folder: Path) -> Iterator[str]:
    for place, folders, names in os.walk(folder, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith((".", "__"))]
        below = os.path.relpath(place, folder)
        for name in names:
            if not name.startswith(".") and os.path.splitext(name)[0].lower() not in _ABOUT_IT:
                yield Path(below, name).as_posix()


def _refuse(error: OSError) -> None:
    raise error
