"""JSON, JSON-lines, CSV and TSV files of a task; errors name file and line."""

from __future__ import annotations

import base64
import binascii
import csv
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from subtoken_train.datasets.image_sources import EncodedImage
from subtoken_train.documents import check_regular, parse_json
from subtoken_train.evaluation.tasks.file_rows import FileRow
from subtoken_train.typed import shown

SHORT = 64
"""Characters; a cell with so few is no base64 image (VLMEvalKit's rule)."""

_CUT_OFF = "the file may be cut off: fetch it again"


class _CountedLines:
    """The lines of a file as text, and how many bytes were read."""

    def __init__(self, path: Path, start: int = 0) -> None:
        self.path = path
        self.bytes = start

    def __iter__(self) -> Iterator[str]:
        with self.path.open("rb") as file:
            file.seek(self.bytes)
            for line in file:
                self.bytes += len(line)
                yield line.decode().removeprefix("\ufeff")


@dataclass(frozen=True)
class _Base64Cell:
    """Reads an image that is base64 text in the row of a table that starts at byte ``offset``."""

    path: Path
    offset: int
    delimiter: str
    column: int
    place: str

    def __call__(self) -> bytes:
        with _long_cells():
            row = next(csv.reader(_CountedLines(self.path, self.offset), delimiter=self.delimiter))
        try:
            return base64.b64decode(row[self.column], validate=True)
        except binascii.Error as error:
            raise ValueError(f"image {self.place} is no base64 text ({error}); {_CUT_OFF}") from None


def benchmark_text(path: Path) -> str:
    """The content of a text file.

    Raises:
        ValueError: the file is missing or not UTF-8.
    """
    try:
        check_regular(path)
        return path.read_text(encoding="utf-8")
    except OSError:
        raise ValueError(f"{path} is missing or cannot be read; check the path") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}, line {line}: not UTF-8 ({error.reason})") from None


def benchmark_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        ValueError: the file is missing, not UTF-8, or not JSON.
    """
    text = benchmark_text(path)
    try:
        return parse_json(text, str(path))
    except ValueError as error:
        raise ValueError(f"{error}; {_CUT_OFF}") from None


def read_entries(path: Path, key: str, columns: Sequence[str] = ()) -> list[FileRow]:
    """The objects of the list that a JSON file holds under a key.

    Args:
        path: of the file.
        key: of the list.
        columns: that each object must have; others are read, too.

    Raises:
        ValueError: the file is missing or not JSON, there is no such list, or an entry lacks a column.
    """
    content = benchmark_json(path)
    entries = content.get(key) if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise ValueError(f"{path} has no list {key!r}; is it another file?")
    return [_object(values, f"{path}, {key}[{number}]", columns) for number, values in enumerate(entries)]


def read_named(path: Path, columns: Sequence[str] = ()) -> dict[str, FileRow]:
    """The objects of a JSON file that is one object of objects, by their names.

    Args:
        path: of the file.
        columns: that each object must have; others are read, too.

    Raises:
        ValueError: the file is missing or not JSON, holds something else, or an entry lacks a column.
    """
    content = benchmark_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {shown(content)} instead of named objects; is it another file?")
    return {name: _object(values, f"{path}, {name!r}", columns) for name, values in content.items()}


def read_jsonl(path: Path, columns: Sequence[str] = ()) -> list[FileRow]:
    """The objects of a JSON-lines file, whatever its suffix; empty lines are passed over.

    Args:
        path: one object a line.
        columns: that each must have; others are read, too.

    Raises:
        ValueError: the file is missing, a line is no JSON object, or it lacks a column.
    """
    rows = []
    for number, line in enumerate(benchmark_text(path).split("\n"), start=1):
        place = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            values = parse_json(line, place)
        except ValueError as error:
            raise ValueError(f"{error}; {_CUT_OFF}") from None
        rows.append(_object(values, place, columns))
    return rows


def read_lines(path: Path) -> list[FileRow]:
    """The lines of a text file that are not empty, column ``text``.

    Raises:
        ValueError: the file is missing or not UTF-8.
    """
    lines = enumerate(benchmark_text(path).splitlines(), start=1)
    return [FileRow({"text": line}, f"{path}, line {number}") for number, line in lines if line.strip()]


def read_table(
    path: Path,
    columns: Sequence[str],
    delimiter: str = ",",
    image: str | None = None,
    header: bool = True,
) -> list[FileRow]:
    """The rows of a CSV or TSV file; all values are text.

    Args:
        path: UTF-8; cells may be quoted and hold line breaks.
        columns: that it must have; others are read, too. Without ``header``: exactly these, in order.
        delimiter: between cells.
        image: column of base64 images, which become ``EncodedImage``: their text is not kept in memory. Text that is
            too short for an image stays.
        header: the first line names the columns.

    Raises:
        ValueError: the file is missing or not UTF-8, lacks a column, or a row has another number of cells.
    """
    needed = (*columns, image) if image else columns
    try:
        check_regular(path)
        with _long_cells():
            lines = _cells(path, delimiter)
            first = next(lines, None) if header else (0, "", columns)
            if first is None:
                raise ValueError(f"{path} is empty; {_CUT_OFF}")
            names = list(first[2])
            _check_columns(str(path), needed, names)
            return [_row(path, delimiter, names, image, *line) for line in lines]
    except OSError:
        raise ValueError(f"{path} is missing or cannot be read; check the path") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error.reason})") from None


def _cells(path: Path, delimiter: str) -> Iterator[tuple[int, str, Sequence[str]]]:
    """Offset, place and cells of each row; empty lines are passed over."""
    lines = _CountedLines(path)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        offset, place = lines.bytes, f"{path}, line {reader.line_num + 1}"
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise ValueError(f"{place}: {error}; {_CUT_OFF}") from None
        if cells is None:
            return
        if cells:
            yield offset, place, cells


def _row(
    path: Path, delimiter: str, names: list[str], image: str | None, offset: int, place: str, cells: Sequence[str]
) -> FileRow:
    if len(cells) != len(names):
        raise ValueError(f"{place}: {len(cells)} cells, {len(names)} are wanted; {_CUT_OFF}")
    values: dict[str, Any] = dict(zip(names, cells, strict=True))
    if image and len(values[image]) > SHORT:
        values[image] = EncodedImage(_Base64Cell(path, offset, delimiter, names.index(image), place), place)
    return FileRow(values, place)


@contextmanager
def _long_cells() -> Iterator[None]:
    """Cells as long as images; the library's limit is for the whole process, so it is put back."""
    limit = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


def _object(values: Any, place: str, columns: Sequence[str]) -> FileRow:
    if not isinstance(values, dict):
        raise ValueError(f"{place}: a JSON object is wanted, got {shown(values)}")
    _check_columns(place, columns, list(values))
    for name, kinds in _NAMES.items():
        if not isinstance(values.get(name), kinds):
            raise ValueError(f"{place}: {name} is {shown(values[name])}; a text is wanted, or a number; {_CUT_OFF}")
    return FileRow(values, place)


_NAMES = dict.fromkeys(("id", "question_id", "image_id", "imageId"), str | int | None)
"""Columns that name a row or an image, in all benchmarks alike."""


def _check_columns(place: str, wanted: Sequence[str], present: Sequence[str]) -> None:
    if missing := [name for name in wanted if name not in present]:
        raise ValueError(f"{place}: no column {', '.join(missing)}; it has {', '.join(present)}")
