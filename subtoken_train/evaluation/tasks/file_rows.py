"""Rows of a task's files, whatever form these have: values by column, and the place for messages."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from subtoken_train.datasets.image_sources import ImageSource
from subtoken_train.evaluation.tasks.task import Task

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
CUT_OFF = "the file may be cut off: fetch it again"


class FileRow(NamedTuple):
    """One row of a file.

    Attributes:
        values: by column; images are ``EncodedImage`` or None.
        place: file and line or row, counted from 1.
    """

    values: Mapping[str, Any]
    place: str

    def text(self, column: str) -> str:
        """The text of a cell.

        Raises:
            ValueError: it holds none.
        """
        value = self.values[column]
        if not isinstance(value, str):
            raise ValueError(f"{self.place}: {column} is {value!r}, and a text is wanted; fetch the file again")
        return value

    def texts(self, column: str) -> list[str]:
        """The list of texts of a cell, which may be those that mappings have as ``answer``.

        Raises:
            ValueError: it holds no such list.
        """
        found = self.values[column]
        if isinstance(found, list):
            given = [one.get("answer") if isinstance(one, Mapping) else one for one in found]
            texts = [text for text in given if isinstance(text, str)]
            if len(texts) == len(given):
                return texts
        raise ValueError(f"{self.place}: {column} is {found!r}, and a list of texts is wanted; fetch the file again")

    def image(self, column: str = "image") -> tuple[ImageSource]:
        """The row's image.

        Raises:
            ValueError: it has none.
        """
        if self.values[column] is None:
            raise ValueError(f"{self.place}: the row has no image; fetch the file again")
        return (self.values[column],)

    def with_values(self, **values: Any) -> FileRow:
        """The row with some values more, or others."""
        return FileRow({**self.values, **values}, self.place)


def task_source(task: Task) -> Path | str:
    """Where a task's files are: a folder, or a Hub id.

    Raises:
        ValueError: neither; the message says how to get the files.
    """
    source = task.source if task.source is not None else task.hub_id
    if source is None:
        raise ValueError(f"task {task.name} is on no hub: give source, the folder with its files. {task.where}")
    if Path(source).is_dir():
        return Path(source)
    if isinstance(source, str) and _HUB_ID.fullmatch(source) and not source.startswith("."):
        return source
    raise ValueError(f"task {task.name}: {source} is neither a folder nor a Hub id (owner/name). {task.where}")


def find_file(task: Task, folder: Path, *names: str) -> Path:
    """The first of ``names`` that is in ``folder``; a ``ValueError`` that says how to get the files if none is."""
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise ValueError(f"task {task.name}: {folder} has no {' or '.join(names)}. {task.where}")


def unique_ids(ids: Iterable[tuple[str, str]]) -> None:
    """Refuse an id that is there twice, by a ``ValueError`` that names both places.

    Args:
        ids: each with its place.
    """
    seen: dict[str, str] = {}
    for name, place in ids:
        if name in seen:
            raise ValueError(f"{place}: id {name!r} is there twice, first in {seen[name]}; keep one")
        seen[name] = place


def check_columns(place: str, wanted: Iterable[str], present: Collection[str]) -> None:
    """Refuse a row or a file without some of the columns that are wanted, by a ``ValueError``."""
    if missing := [name for name in wanted if name not in present]:
        raise ValueError(f"{place}: no column {', '.join(missing)}; it has {', '.join(present)}")
