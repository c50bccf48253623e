"""CSV, TSV and Parquet files of a task, in a folder or on the Hub. Errors name file and line; images stay encoded."""

from __future__ import annotations

import base64
import csv
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
from datasets import Dataset, Image, List, load_dataset
from datasets.exceptions import DatasetNotFoundError, DatasetsError
from pyarrow import ArrowInvalid

from subtoken_train.datasets.image_sources import EncodedImage
from subtoken_train.documents import check_regular
from subtoken_train.evaluation.tasks.file_rows import CUT_OFF, FileRow, check_columns, task_source
from subtoken_train.evaluation.tasks.task import Task
from subtoken_train.families.online import hub_asked, silence

if TYPE_CHECKING:
    from _csv import Reader

SHORT = 64  # characters; a cell with so few is no base64 image (VLMEvalKit's rule)


def read_table(
    path: Path, columns: Sequence[str], delimiter: str = ",", image: str | None = None, header: bool = True
) -> list[FileRow]:
    """Read the rows of a CSV or TSV file in UTF-8; all values are text.

    It must have ``columns``; others are read, too. Without ``header`` it has exactly these, in order. Base64 images of
    the column ``image`` become ``EncodedImage``; text that is too short for an image stays.
    """
    limit = csv.field_size_limit(sys.maxsize)  # cells as long as images; the limit is the whole process's
    try:
        check_regular(path)
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = _cells(path, csv.reader(file, delimiter=delimiter, strict=True))
            names = list(columns) if not header else next((cells for _, cells in lines), None)
            if names is None:
                raise ValueError(f"{path} is empty; {CUT_OFF}")
            check_columns(str(path), (*columns, image) if image else columns, names)
            return [_row(place, names, cells, image) for place, cells in lines]
    except OSError:
        raise ValueError(f"{path} is missing or cannot be read; check the path") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error.reason})") from None
    finally:
        csv.field_size_limit(limit)


def _cells(path: Path, reader: Reader) -> Iterator[tuple[str, list[str]]]:
    while True:
        place = f"{path}, line {reader.line_num + 1}"
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise ValueError(f"{place}: {error}; {CUT_OFF}") from None
        if cells is None:
            return
        if any("\0" in cell for cell in cells):
            raise ValueError(f"{place}: holds a NUL character, so it is not text; {CUT_OFF}")
        if cells:
            yield place, cells


def _row(place: str, names: list[str], cells: list[str], image: str | None) -> FileRow:
    if len(cells) != len(names):
        raise ValueError(f"{place}: {len(cells)} cells, but {len(names)} columns; {CUT_OFF}")
    values: dict[str, Any] = dict(zip(names, cells, strict=True))
    if image and len(values[image]) > SHORT:
        values[image] = EncodedImage(partial(_decoded, values[image], place), place)
    return FileRow(values, place)


def _decoded(cell: str, place: str) -> bytes:
    try:
        return base64.b64decode(cell, validate=True)
    except ValueError as error:
        raise ValueError(f"image {place} is not base64 text ({error}); {CUT_OFF}") from None


_ORGANISATIONS = ("lmms-lab", "lmms-lab-encoder")  # renamed; releases of lmms-eval up to 0.7.2 use the first


def parquet_files(folder: Path, split: str, config: str | None = None) -> list[Path]:
    """Return the Parquet files of one split, in order; empty where there is none.

    The folder is as ``hf download OWNER/NAME --repo-type dataset --local-dir folder`` leaves it, or one configuration's
    folder of it; ``config`` names that folder (None: the default one, ``data`` or ``default``).
    """
    below = ("data", "default", "") if config is None else (config, "")
    patterns = (f"{split}-*-of-*.parquet", f"{split}.parquet")
    places = (sorted((folder / name).glob(pattern)) for name in below for pattern in patterns)
    return next((found for found in places if found), [])


def read_split(
    task: Task, split: str, columns: Sequence[str], images: Sequence[str] = (), config: str | None = None
) -> list[FileRow]:
    """Read all rows of one split of the task's Parquet set: the columns at once, images when they are asked for.

    ``datasets`` converts the files once, into its own cache. An image may be the one entry of a list. Shards that are
    missing are no error here: ``check_complete`` names them.
    """
    source = task_source(task)
    label = split if config is None else f"{config}, {split}"
    if isinstance(source, str):
        dataset = _from_hub(task, source, split, config)
        places = [f"{source} ({label}), row {row + 1}" for row in range(len(dataset))]
    else:
        paths = parquet_files(source, split, config)
        if not paths:
            below = "data" if config is None else config
            raise ValueError(f"task {task.name}: {source} has no {below}/{split}-*.parquet. {task.where}")
        places = [f"{path}, row {row + 1}" for path in paths for row in range(_count_rows(path))]
        dataset = _from_files(paths)
    if missing := [name for name in (*columns, *images) if name not in dataset.column_names]:
        here = ", ".join(dataset.column_names)
        raise ValueError(f"{source} ({label}) has no column {', '.join(missing)}; its columns are {here}")
    return _rows(dataset, places, columns, images)


def _rows(dataset: Dataset, places: list[str], columns: Sequence[str], images: Sequence[str]) -> list[FileRow]:
    content = {name: dataset.data.column(name).to_pylist() for name in columns}
    absent = {name: dataset.data.column(name).is_null().to_pylist() for name in images}
    rows = []
    for number, place in enumerate(places):
        values: dict[str, Any] = {name: column[number] for name, column in content.items()}
        for name in images:
            values[name] = (
                None if absent[name][number] else EncodedImage(partial(_encoded_image, dataset, number, name), place)
            )
        rows.append(FileRow(values, place))
    return rows


def _encoded_image(dataset: Dataset, row: int, column: str) -> bytes:
    value = dataset[row][column]
    if isinstance(value, list):
        if len(value) != 1:
            raise ValueError(f"the row holds {len(value)} images, where one belongs; fetch the files again")
        value = value[0]
    if isinstance(value, dict):
        value = value.get("bytes")
    if value is None:
        raise ValueError("the row holds no bytes of an image; fetch the files again")
    return bytes(value)


def _count_rows(path: Path) -> int:
    check_regular(path)
    try:
        return int(pq.read_metadata(path).num_rows)
    except (ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} is cut off or no Parquet file ({_reason(error)}); fetch it again") from None


def _from_files(paths: list[Path]) -> Dataset:
    try:
        return _encoded(load_dataset("parquet", data_files=[str(path) for path in paths], split="train"))
    except Exception as error:  # whatever the readers of broken files raise
        reason = _reason(error.__cause__ or error)
        raise ValueError(f"{paths[0].parent} cannot be read as Parquet ({reason}); fetch it again") from None


def _reason(error: BaseException) -> str:
    if isinstance(error, UnicodeError):
        return "a text that is not UTF-8"
    return " ".join(str(error).split()) if isinstance(error, OSError | ValueError) else "its description is damaged"


def _from_hub(task: Task, hub_id: str, split: str, config: str | None) -> Dataset:
    owner, _, name = hub_id.partition("/")
    others = [f"{other}/{name}" for other in _ORGANISATIONS if other != owner] if owner in _ORGANISATIONS else []
    reason: Exception | None = None
    for candidate in (hub_id, *others):
        try:
            with hub_asked():
                return _encoded(load_dataset(candidate, config, split=split))
        except DatasetNotFoundError as error:
            reason = reason or error
        except (OSError, ValueError, DatasetsError) as error:  # no network, no such configuration or split, a bad file
            reason = error
            break
    raise ValueError(f"task {task.name}: {hub_id} cannot be loaded ({silence() or reason}). {task.where}")


def _encoded(dataset: Dataset) -> Dataset:
    for name, feature in list(dataset.features.items()):
        if isinstance(feature, Image):
            dataset = dataset.cast_column(name, Image(decode=False))
        elif isinstance(feature, List) and isinstance(feature.feature, Image):
            dataset = dataset.cast_column(name, List(Image(decode=False)))
    return dataset
