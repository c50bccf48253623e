"""CSV and TSV files of a task; errors name file and line, images stay encoded in their place."""

from __future__ import annotations

import base64
import binascii
import csv
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from subtoken_train.datasets.image_sources import EncodedImage
from subtoken_train.documents import check_regular
from subtoken_train.evaluation.tasks.file_rows import CUT_OFF, FileRow, check_columns

SHORT = 64
"""Characters; a cell with so few is no base64 image (VLMEvalKit's rule)."""


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
                raise ValueError(f"{path} is empty; {CUT_OFF}")
            names = list(first[2])
            check_columns(str(path), needed, names)
            return [_row(path, delimiter, names, image, *line) for line in lines]
    except OSError:
        raise ValueError(f"{path} is missing or cannot be read; check the path") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error.reason})") from None


def _cells(path: Path, delimiter: str) -> Iterator[tuple[int, str, Sequence[str]]]:
    """Offset, place and cells of each row; empty lines are passed over."""
    with path.open("rb") as file:
        reader = csv.reader(_lines(file), delimiter=delimiter, strict=True)
        while True:
            offset, place = file.tell(), f"{path}, line {reader.line_num + 1}"
            try:
                cells = next(reader, None)
            except csv.Error as error:
                raise ValueError(f"{place}: {error}; {CUT_OFF}") from None
            if cells is None:
                return
            if cells:
                yield offset, place, cells


def _lines(file: BinaryIO) -> Iterator[str]:
    return (line.decode().removeprefix("\ufeff") for line in file)


def _row(
    path: Path, delimiter: str, names: list[str], image: str | None, offset: int, place: str, cells: Sequence[str]
) -> FileRow:
    if len(cells) != len(names):
        raise ValueError(f"{place}: {len(cells)} cells, {len(names)} are wanted; {CUT_OFF}")
    values: dict[str, Any] = dict(zip(names, cells, strict=True))
    if image and len(values[image]) > SHORT:
        values[image] = EncodedImage(partial(_decoded_cell, path, offset, delimiter, names.index(image), place), place)
    return FileRow(values, place)


def _decoded_cell(path: Path, offset: int, delimiter: str, column: int, place: str) -> bytes:
    """The image that is base64 text in the row that starts at byte ``offset``."""
    with path.open("rb") as file, _long_cells():
        file.seek(offset)
        cell = next(csv.reader(_lines(file), delimiter=delimiter))[column]
    try:
        return base64.b64decode(cell, validate=True)
    except binascii.Error as error:
        raise ValueError(f"image {place} is no base64 text ({error}); {CUT_OFF}") from None


@contextmanager
def _long_cells() -> Iterator[None]:
    """Cells as long as images; the library's limit is for the whole process, so it is put back."""
    limit = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(limit)
