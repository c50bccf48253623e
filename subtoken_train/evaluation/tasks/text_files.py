"""Text, JSON and JSON-lines files of a task; errors name file and line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from subtoken_train.documents import check_regular, parse_json
from subtoken_train.evaluation.tasks.file_rows import CUT_OFF, FileRow, check_columns
from subtoken_train.typed import shown

MAX_TEXT = 2**32
"""Bytes of a benchmark's file at most."""


def benchmark_text(path: Path) -> str:
    """The content of a text file.

    Raises:
        ValueError: the file is missing or not UTF-8, or holds a NUL, which no text does.
    """
    try:
        if (size := check_regular(path)) > MAX_TEXT:
            raise ValueError(f"{path} has {size:,} bytes; at most {MAX_TEXT:,} are read")
        text = path.read_text(encoding="utf-8")
    except OSError:
        raise ValueError(f"{path} is missing or cannot be read; check the path") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}, line {line}: not UTF-8 ({error.reason})") from None
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        raise ValueError(f"{path}, line {line}: holds a NUL character, so it is no text; {CUT_OFF}")
    return text


def benchmark_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        ValueError: the file is missing, not UTF-8, or not JSON.
    """
    return _parsed(benchmark_text(path), str(path))


def read_entries(path: Path, key: str, columns: Sequence[str] = ()) -> list[FileRow]:
    """The objects of the list that a JSON file holds under a key; ``columns`` are those that each must have.

    Raises:
        ValueError: the file is missing or not JSON, there is no such list, or an entry lacks a column.
    """
    content = benchmark_json(path)
    entries = content.get(key) if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise ValueError(f"{path} has no list {key!r}; is it another file?")
    return [_object(values, f"{path}, {key}[{number}]", columns) for number, values in enumerate(entries)]


def read_named(path: Path, columns: Sequence[str] = ()) -> dict[str, FileRow]:
    """The objects of a JSON file that is one object of objects, by their names; each must have the columns.

    Raises:
        ValueError: the file is missing or not JSON, holds something else, or an entry lacks a column.
    """
    content = benchmark_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {shown(content)} instead of named objects; is it another file?")
    return {name: _object(values, f"{path}, {name!r}", columns) for name, values in content.items()}


def read_jsonl(path: Path, columns: Sequence[str] = ()) -> list[FileRow]:
    """The objects of a JSON-lines file, whatever its suffix; each must have the columns. Empty lines are passed over.

    Raises:
        ValueError: the file is missing or one list, a line is no JSON object, or it lacks a column.
    """
    text = benchmark_text(path)
    if text.lstrip().startswith("["):
        raise ValueError(f"{path} is one JSON list; one JSON object a line is wanted: write a line for each of them")
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        place = f"{path}, line {number}"
        if line.strip():
            rows.append(_object(_parsed(line, place), place, columns))
    return rows


def read_lines(path: Path) -> list[FileRow]:
    """The lines of a text file that are not empty, column ``text``.

    Raises:
        ValueError: the file is missing or not UTF-8.
    """
    lines = enumerate(benchmark_text(path).removeprefix("\ufeff").splitlines(), start=1)
    return [FileRow({"text": line}, f"{path}, line {number}") for number, line in lines if line.strip()]


def _parsed(text: str, place: str) -> Any:
    try:
        return parse_json(text, place)
    except ValueError as error:
        raise ValueError(f"{error}; {CUT_OFF}") from None


def _object(values: Any, place: str, columns: Sequence[str]) -> FileRow:
    if not isinstance(values, dict):
        raise ValueError(f"{place}: a JSON object is wanted, got {shown(values)}")
    check_columns(place, columns, list(values))
    for name, kinds in _NAMES.items():
        if not isinstance(values.get(name), kinds) or isinstance(values.get(name), bool):
            raise ValueError(f"{place}: {name} is {shown(values[name])}; a text is wanted, or a number; {CUT_OFF}")
    return FileRow(values, place)


_NAMES = dict.fromkeys(("id", "question_id", "image_id", "imageId"), str | int | None)
"""Columns that name a row or an image, in all benchmarks alike."""
