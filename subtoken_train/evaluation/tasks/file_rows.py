"""Rows of a task's files, values by column; its text, JSON and JSON-lines files; whether a set is whole.

Errors name file and line.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from subtoken_train.datasets.image_sources import (
    ImageSource,
    PictureSource,
    VideoSource,
    compare_images,
    first_frame,
    open_image,
)
from subtoken_train.documents import check_regular, parse_json
from subtoken_train.evaluation.tasks.task import Sample, Task
from subtoken_train.typed import shown

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
CUT_OFF = "the file may be cut off: fetch it again"


class FileRow(NamedTuple):
    """Values by column, images ``EncodedImage`` or None, and the place: file and line or row, counted from 1."""

    values: Mapping[str, Any]
    place: str

    def text(self, column: str) -> str:
        """Return the text of a cell."""
        value = self.values[column]
        if not isinstance(value, str):
            raise ValueError(f"{self.place}: {column} is {value!r}, but must be a text; fetch the file again")
        return value

    def texts(self, column: str) -> list[str]:
        """Return the texts of a cell, which mappings may have as ``answer``."""
        found = self.values[column]
        if isinstance(found, list):
            given = [one.get("answer") if isinstance(one, Mapping) else one for one in found]
            texts = [text for text in given if isinstance(text, str)]
            if len(texts) == len(given):
                return texts
        raise ValueError(f"{self.place}: {column} is {found!r}, but must be a list of texts; fetch the file again")

    def image(self, column: str = "image") -> tuple[ImageSource]:
        """Return the row's image."""
        if self.values[column] is None:
            raise ValueError(f"{self.place}: the row has no image; fetch the file again")
        return (self.values[column],)

    def with_values(self, **values: Any) -> FileRow:
        """Return the row with some values more, or others."""
        return FileRow({**self.values, **values}, self.place)


def task_source(task: Task) -> Path | str:
    """Return where a task's files are, a folder or a Hub id."""
    source = task.source if task.source is not None else task.hub_id
    if source is None:
        raise ValueError(f"task {task.name} is on no hub: give source, the folder with its files. {task.where}")
    if Path(source).is_dir():
        return Path(source)
    if isinstance(source, str) and _HUB_ID.fullmatch(source) and not source.startswith("."):
        return source
    raise ValueError(f"task {task.name}: {source} is neither a folder nor a Hub id (owner/name). {task.where}")


def task_folder(task: Task) -> Path:
    """Return the folder of a task that is read from a folder alone."""
    source = task_source(task)
    if not isinstance(source, Path):
        raise ValueError(f"task {task.name} reads a folder, and {source} is none. {task.where}")
    return source


def find_file(task: Task, folder: Path, *names: str) -> Path:
    """Find the first of ``names`` in ``folder``."""
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise ValueError(f"task {task.name}: {folder} has no {' or '.join(names)}. {task.where}")


def unique_ids(ids: Iterable[tuple[str, str]]) -> None:
    """Refuse an id that is there twice, by a ``ValueError`` that names both places."""
    seen: dict[str, str] = {}
    for name, place in ids:
        if name in seen:
            raise ValueError(f"{place}: id {name!r} appears twice, first in {seen[name]}; keep one")
        seen[name] = place


def check_columns(place: str, wanted: Iterable[str], present: Collection[str]) -> None:
    """Refuse a row or a file without some of the columns that are wanted, by a ``ValueError``."""
    if missing := [name for name in wanted if name not in present]:
        raise ValueError(f"{place}: no column {', '.join(missing)}; it has {', '.join(present)}")


MAX_TEXT = 2**32  # bytes of a benchmark's file at most


def benchmark_text(path: Path) -> str:
    """Read a text file; a ``ValueError`` where it is missing, not UTF-8, or holds a NUL, which no text does."""
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
        raise ValueError(f"{path}, line {line}: holds a NUL character, so it is not text; {CUT_OFF}")
    return text


def benchmark_json(path: Path) -> Any:
    """Read a JSON file."""
    return _parsed(benchmark_text(path), str(path))


def read_entries(path: Path, key: str | None, columns: Sequence[str] = ()) -> list[FileRow]:
    """Read the objects of the list that a JSON file is, or holds under a key; each must have the columns."""
    content = benchmark_json(path)
    entries = content if key is None else content.get(key) if isinstance(content, dict) else None
    if not isinstance(entries, list):
        lacks = "is no list" if key is None else f"has no list {key!r}"
        raise ValueError(f"{path} {lacks}; is it another file?")
    return [_object(values, f"{path}, {key or 'entry'}[{number}]", columns) for number, values in enumerate(entries)]


def read_named(path: Path, columns: Sequence[str] = ()) -> dict[str, FileRow]:
    """Read the objects of a JSON file that is one object of objects, by their names; each must have the columns."""
    content = benchmark_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {shown(content)} instead of named objects; is it another file?")
    return {name: _object(values, f"{path}, {name!r}", columns) for name, values in content.items()}


def read_jsonl(path: Path, columns: Sequence[str] = ()) -> list[FileRow]:
    """Read the objects of a JSON-lines file, whatever its suffix; each must have the columns. Empty lines go."""
    text = benchmark_text(path)
    if text.lstrip().startswith("["):
        raise ValueError(f"{path} is one JSON list, not one JSON object per line: write a line for each of them")
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        place = f"{path}, line {number}"
        if line.strip():
            rows.append(_object(_parsed(line, place), place, columns))
    return rows


def read_lines(path: Path) -> list[FileRow]:
    """Read the lines of a text file that are not empty, column ``text``."""
    lines = enumerate(benchmark_text(path).removeprefix("\ufeff").splitlines(), start=1)
    return [FileRow({"text": line}, f"{path}, line {number}") for number, line in lines if line.strip()]


def _parsed(text: str, place: str) -> Any:
    try:
        return parse_json(text, place)
    except ValueError as error:
        raise ValueError(f"{error}; {CUT_OFF}") from None


def _object(values: Any, place: str, columns: Sequence[str]) -> FileRow:
    if not isinstance(values, dict):
        raise ValueError(f"{place}: expected a JSON object, got {shown(values)}")
    check_columns(place, columns, list(values))
    for name in ("id", "question_id", "image_id", "imageId"):  # of a row or an image, in all benchmarks alike
        if not isinstance(values.get(name), str | int | None) or isinstance(values.get(name), bool):
            raise ValueError(f"{place}: {name} is {shown(values[name])}; it must be a text or a number; {CUT_OFF}")
    return FileRow(values, place)


_PLACEHOLDER = "<image>"
_OPENED = 5
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})(?:-[0-9a-f]+)?\.parquet")


def check_complete(task: Task, samples: Sequence[Sample], limit: int | None) -> None:
    """Refuse a part of a set as if it were the set, unless a run asks for no more samples than its files hold."""
    if not samples:
        raise ValueError(f"task {task.name}: {task.source or task.hub_id} holds no sample. {task.where}")
    found, expected = len(samples), task.expected_rows
    if expected is None or found == expected or (limit is not None and found >= limit):
        return
    missing = missing_shards(Path(task.source)) if task.source is not None else []
    hint = f" Missing: {', '.join(missing)}." if missing else ""
    raise ValueError(
        f"task {task.name} has {found:,} of {expected:,} samples in {task.source or task.hub_id}.{hint} "
        f"Get the rest, or limit the run. {task.where}"
    )


def missing_shards(folder: Path) -> list[str]:
    """Find Parquet shards below ``folder`` that others' names promise (``-00000-of-00003``) but that are not there."""
    present: dict[tuple[Path, str, int], set[int]] = {}
    for path in folder.rglob("*.parquet"):
        if match := _SHARD.fullmatch(path.name):
            key = (path.parent.relative_to(folder), match["stem"], int(match["total"]))
            present.setdefault(key, set()).add(int(match["number"]))
    return [
        (parent / f"{stem}-{number:05}-of-{total:05}.parquet").as_posix()
        for (parent, stem, total), numbers in sorted(present.items())
        for number in sorted(set(range(total)) - numbers)
    ]


def check_samples(task: Task, samples: Sequence[Sample]) -> None:
    """Check every sample, of a task of one's own too."""
    unique_ids((sample.id, f"task {task.name}, sample {n:,}") for n, sample in enumerate(samples, 1))
    for sample in samples:
        written = sample.prompt.count(_PLACEHOLDER) if task.modality == "image" else len(sample.images)
        if written != len(sample.images):
            raise ValueError(
                f"task {task.name}, sample {sample.id!r}: {written} {_PLACEHOLDER} in the prompt for "
                f"{len(sample.images)} images; write one for each"
            )
        if sample.context_characters is not None and not 0 <= sample.context_characters <= len(sample.prompt):
            raise ValueError(
                f"task {task.name}, sample {sample.id!r}: context_characters {sample.context_characters} lies outside "
                f"its prompt of {len(sample.prompt)}"
            )
    named = dict.fromkeys(str(path) for sample in samples for image in sample.images for path in _files(image))
    missing = [name for folder in compare_images(named, Path(), outside=True) for name in folder.missing]
    if missing:
        raise ValueError(
            f"task {task.name}: {len(missing):,} of {len(named):,} images are missing (first: {missing[0]}). "
            f"{task.where}"
        )


def _files(image: PictureSource) -> tuple[Path, ...]:
    """Return what must be there: a file, the files of a video or their folder."""
    if isinstance(image, VideoSource):
        return (image.frames,) if isinstance(image.frames, Path) else image.frames
    return (image,) if isinstance(image, Path) else ()


def open_some(samples: Sequence[Sample]) -> list[tuple[int, int]]:
    """Open a few images, spread over the samples; their widths and heights in pixels."""
    seen = [sample for sample in samples if sample.images]
    step = max(1, len(seen) // _OPENED)
    return [open_image(first_frame(sample.images[0])).size for sample in seen[::step][:_OPENED]]
