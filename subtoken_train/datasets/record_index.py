"""The records of a file of conversations as one Arrow table: checked, in LLaVA's form, with what is asked of each.

The table of a large file is made once (every record is parsed and checked), kept in the cache of the datasets library
and memory-mapped from then on: opening it reads nothing, and all processes of a machine share its pages. It is made
anew when the file's size or date changes. That of a small file is made in memory each time.

Legend: R records.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from subtoken_train.datasets.conversations import llava_form
from subtoken_train.datasets.known_files import absent
from subtoken_train.datasets.record_format import (
    has_media,
    image_names,
    record_id,
    record_problem,
    text_length,
    video_names,
)
from subtoken_train.datasets.row_files import file_kind, files_of_set, kept_rows, read_rows
from subtoken_train.datasets.text_media import files_named
from subtoken_train.documents import real_path

SMALL_FILE = 2**24  # bytes; below, making the table takes a fraction of a second
_LAYOUT = "8"  # raise it when the columns, or the checks of a record, change
_COUNTS, _LISTS = ("characters", "pictures", "videos"), ("images", "unread", "in_texts")


def open_records(path: Path) -> pa.Table:
    """Return a row for each record of a data file, from the cache where it is there and the file has not changed since.

    Its columns: ``row`` (the record in LLaVA's form, as JSON), ``characters`` (of its turns without placeholders),
    ``pictures`` (images and videos that it names), ``videos`` (those among them), ``images`` (names of images, frames
    and folders of frames, ``clip/``), ``unread`` (fields that nobody reads), ``in_texts`` (files of media that texts
    alone name).
    """
    if not path.exists():
        raise absent("data file", path)
    if file_kind(path) in (".csv", ".tsv"):
        raise ValueError(f"{path} is a table; this makes records of it: subtoken-train init {path.parent}")
    if sum(file.stat().st_size for file in files_of_set(path)) < SMALL_FILE:
        kinds = [("row", pa.large_string()), *((name, pa.int64()) for name in _COUNTS)]
        kinds += [(name, pa.list_(pa.string())) for name in _LISTS]
        return pa.Table.from_pylist(list(_described(path)), pa.schema(kinds))
    from datasets import List, Value

    features = {"row": Value("large_string"), **dict.fromkeys(_COUNTS, Value("int64"))}
    features |= dict.fromkeys(_LISTS, List(Value("string")))
    return kept_rows(partial(_described, path), features, file_state(path)).data.table


def file_state(path: Path) -> str:
    """Return what a table stands for: layout, path, sizes and dates (ns) of its files."""
    stats = [(str(real_path(file)), file.stat().st_size, file.stat().st_mtime_ns) for file in files_of_set(path)]
    return hashlib.sha256(repr((_LAYOUT, stats)).encode()).hexdigest()[:32]


def _described(path: Path) -> Iterator[dict[str, Any]]:
    """Parse and check every record, and yield its columns."""
    place = -1
    for place, found in enumerate(read_rows(path)):
        unread: set[str] = set()
        row = checked_record(found, f"{path}, record {record_id(found, place)!r}", unread)
        videos = video_names(row)
        folders = [video.rstrip("/") + "/" for video in videos if isinstance(video, str)]
        frames = [frame for video in videos if not isinstance(video, str) for frame in video]
        yield {
            "row": json.dumps(row, ensure_ascii=False),
            "characters": text_length(row),
            "pictures": len(image_names(row)) + len(videos),
            "videos": len(videos),
            "images": [*image_names(row), *folders, *frames],
            "unread": sorted(unread),
            "in_texts": files_named(row, has_media(row)),
        }
    if place < 0:
        raise ValueError(f"{path} holds no record; at least one is needed")


def checked_record(row: Any, place: str, unread: set[str], as_document: bool = False) -> dict[str, Any]:
    """Return a record in LLaVA's form, whatever form of ``conversations`` it has.

    Args:
        row: as it stands in the file.
        place: where, for messages.
        unread: gets the names of its fields that nobody reads.
        as_document: see ``llava_form`` and ``record_problem``.
    """
    try:
        made = llava_form(row, unread, as_document)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    if problem := record_problem(made, as_document):
        raise ValueError(f"{place}: {problem}")
    checked: dict[str, Any] = made
    return checked
