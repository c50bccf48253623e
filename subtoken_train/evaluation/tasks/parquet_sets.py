"""Parquet sets of a task: in a folder as ``hf download --local-dir`` leaves it, or on the Hub; images stay encoded.

Text files are read by ``text_files`` and ``table_files``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from datasets import Dataset, Image, load_dataset
from datasets.exceptions import DatasetNotFoundError, DatasetsError
from pyarrow import ArrowInvalid

from subtoken_train.datasets.image_sources import EncodedImage
from subtoken_train.documents import check_regular
from subtoken_train.evaluation.tasks.file_rows import FileRow, task_source
from subtoken_train.evaluation.tasks.task import Task
from subtoken_train.families.online import hub_asked, silence

_ORGANISATIONS = ("lmms-lab", "lmms-lab-encoder")  # renamed; releases of lmms-eval up to 0.7.2 use the first


def parquet_files(folder: Path, split: str, config: str | None = None) -> list[Path]:
    """The Parquet files of one split, in order; empty where there is none.

    Args:
        folder: as ``hf download OWNER/NAME --repo-type dataset --local-dir folder`` leaves it, or one configuration's
            folder of it.
        split: first part of the file names.
        config: its folder's name; None: the default configuration (``data``, ``default``).
    """
    below = ("data", "default", "") if config is None else (config, "")
    patterns = (f"{split}-*-of-*.parquet", f"{split}.parquet")
    places = (sorted((folder / name).glob(pattern)) for name in below for pattern in patterns)
    return next((found for found in places if found), [])


def read_split(
    task: Task, split: str, columns: Sequence[str], images: Sequence[str] = (), config: str | None = None
) -> list[FileRow]:
    """All rows of one split of the task's Parquet set.

    ``datasets`` converts the files once, into its own cache. Shards that are missing are no error here:
    ``check_complete`` names them.

    Args:
        task: whose source is read.
        split: ``test``.
        columns: those to read at once.
        images: columns of images, which are read when they are asked for.
        config: configuration; None: the default one.

    Raises:
        ValueError: there is no such split, configuration or column, a file is truncated, or a download failed.
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
    for name in [name for name, feature in dataset.features.items() if isinstance(feature, Image)]:
        dataset = dataset.cast_column(name, Image(decode=False))
    return dataset
