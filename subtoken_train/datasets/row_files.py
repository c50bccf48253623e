"""Reads the rows of files of every kind that data come in: JSON, JSON lines, Parquet, Arrow (``save_to_disk``), gzip.

Rows of Parquet and Arrow come as JSON's would: labels that ``datasets`` counts by their names, dates as texts. A set in
several files, ``train-00000-of-00002.parquet`` and so on, is read as one by the name of any of them.
"""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from subtoken_train.documents import check_regular
from subtoken_train.typed import shown

ZIPPED = ".gz"
COLUMNAR = (".parquet", ".arrow")
MAX_UNPACKED = 2**28
"""Bytes of a file of gzip's once it is unpacked."""
_TOGETHER = 1000
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})(?=\.)")


def file_kind(name: str | Path) -> str:
    """Return a file's suffix in small letters, without gzip's."""
    path = Path(name)
    return Path(path.stem if path.suffix.lower() == ZIPPED else path.name).suffix.lower()


def first_of_set(name: str) -> str:
    """Return the name of the first file of the set that a file belongs to; its own where it stands alone."""
    return _SHARD.sub(r"-00000-of-\2", name)


def files_of_set(path: Path) -> list[Path]:
    """Return all files of the set that one belongs to, or that ``save_to_disk`` left in a folder.

    Raises:
        ValueError: one is missing, or a folder holds no set.
    """
    if path.is_dir():
        if files := sorted(path.glob("data-*-of-*.arrow")):
            return files_of_set(files[0])
        splits = ", ".join(sorted(map(str, path.glob("*/"))) if (path / "dataset_dict.json").is_file() else ())
        raise ValueError(f"{path} is a folder of several files; name one{f' of its splits: {splits}' * bool(splits)}")
    found = _SHARD.search(path.name)
    if found is None:
        return [path]
    files = [path.with_name(_SHARD.sub(f"-{part:05d}-of-{found[2]}", path.name)) for part in range(int(found[2]))]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ValueError(f"{path} is one of {len(files):,} files, and {missing[0]} is missing; fetch it again")
    return files


def opened(path: Path) -> BinaryIO:
    """Open a regular file; what gzip packed is unpacked in memory.

    Raises:
        ValueError: no regular file, damaged, or more than ``MAX_UNPACKED`` bytes once it is unpacked.
        OSError: it cannot be read.
    """
    check_regular(path)
    if path.suffix.lower() != ZIPPED:
        return path.open("rb")
    try:
        with gzip.open(path) as file:
            content = file.read(MAX_UNPACKED + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be unpacked ({error}); fetch it again") from None
    if len(content) > MAX_UNPACKED:
        raise ValueError(
            f"{path} has more than {MAX_UNPACKED:,} bytes once it is unpacked; gunzip -k {path} unpacks it"
        )
    return io.BytesIO(content)


def columnar_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet or Arrow file as JSON's values, some at a time.

    Raises:
        ValueError: it is broken, or a column holds bytes.
    """
    from datasets import ClassLabel, Features

    check_regular(path)
    try:
        schema, batches = _parquet(path) if file_kind(path) == ".parquet" else _arrow(path)
        labels = {
            name: feature
            for name, feature in Features.from_arrow_schema(schema).items()
            if isinstance(feature, ClassLabel)
        }
        for batch in batches:
            for row in batch.to_pylist():
                made = {name: _plain_value(value, path, name) for name, value in row.items()}
                for name, label in labels.items():
                    made[name] = None if made[name] in (None, -1) else label.int2str(made[name])
                yield made
    except (pa.ArrowException, OSError, TypeError, KeyError) as error:
        raise ValueError(f"{path} cannot be read ({' '.join(str(error).split())[:160]}); fetch it again") from None


def _parquet(path: Path) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    file = pq.ParquetFile(path, memory_map=True)
    return file.schema_arrow, file.iter_batches(batch_size=_TOGETHER)


def _arrow(path: Path) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    try:
        reader = pa.ipc.open_stream(pa.memory_map(str(path)))
    except pa.ArrowInvalid:  # the layout of files, which ``datasets`` does not write
        file = pa.ipc.open_file(pa.memory_map(str(path)))
        return file.schema, map(file.get_batch, range(file.num_record_batches))
    return reader.schema, iter(reader)


def _plain_value(value: Any, path: Path, column: str) -> Any:
    if isinstance(value, bytes):
        raise ValueError(
            f"{path}: column {shown(column)} holds bytes, as of pictures, which are read from files; save them first "
            '(docs/own_data.md, "Pictures inside Parquet")'
        )
    if isinstance(value, dict):
        return {name: _plain_value(each, path, column) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain_value(each, path, column) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
