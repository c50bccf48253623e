"""Reads the rows of files of every kind that data come in: JSON, JSON lines, Parquet, Arrow (``save_to_disk``), gzip.

Rows of Parquet and Arrow come as JSON's would: labels by their names, dates as texts. Any file of a set
(``train-00000-of-00002.parquet``) names the whole.
"""

import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from subtoken_train.datasets.record_format import record_id
from subtoken_train.documents import LENIENT_JSON, check_characters, check_regular, parse_json
from subtoken_train.errors import at_place, refuse
from subtoken_train.outputs import NO_LOCKS
from subtoken_train.typed import shown

if TYPE_CHECKING:
    from datasets import Dataset

ZIPPED = ".gz"
COLUMNAR = (".parquet", ".arrow")
MAX_UNPACKED = 2**28  # bytes of a file of gzip's once it is unpacked
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})(?=\.)")
Kind = str | tuple[str]  # type of a column, as Arrow names it; that of a list's entries in a tuple


def file_kind(name: str | Path) -> str:
    """Return a file's suffix in small letters, without gzip's."""
    path = Path(name)
    return Path(path.stem if path.suffix.lower() == ZIPPED else path.name).suffix.lower()


def first_of_set(name: str) -> str:
    """Return the name of the first file of the set that a file belongs to; its own where it stands alone."""
    return _SHARD.sub(r"-00000-of-\2", name)


def files_of_set(path: Path) -> list[Path]:
    """Return all files of the set that one belongs to, or that ``save_to_disk`` left in a folder."""
    if path.is_dir():
        if files := sorted(path.glob("data-*-of-*.arrow")):
            return files_of_set(files[0])
        splits = ", ".join(sorted(map(str, path.glob("*/"))) if (path / "dataset_dict.json").is_file() else ())
        raise ValueError(f"{path} is a folder of several files; name one{f' of its splits: {splits}' * bool(splits)}")
    if (found := _SHARD.search(path.name)) is None:
        return [path]
    files = [path.with_name(_SHARD.sub(f"-{part:05d}-of-{found[2]}", path.name)) for part in range(int(found[2]))]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ValueError(f"{path} is one of {len(files):,} files, and {missing[0]} is missing; fetch it again")
    return files


def read_rows(path: Path) -> Iterator[Any]:
    """Yield what the rows of a file, or set of files, hold."""
    for file in files_of_set(path):
        yield from _columnar_rows(file) if file_kind(file) in COLUMNAR else scan_records(file)


def placed_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield how messages call each row of a file or set, and the row; there must be one."""
    number = -1
    for number, row in enumerate(read_rows(path)):
        yield f"{path}, record {record_id(row, number)!r}", row
    refuse((number < 0, f"{path} holds no record; at least one is needed"))


def scan_records(path: Path) -> Iterator[Any]:
    """Yield all records of a JSON file, gzip's too: ``.jsonl`` is one record a line, any other name one list."""
    with opened(path) as file:
        yield from _lines(path, file) if file_kind(path) == ".jsonl" else _listed(path, file.read())


def _lines(path: Path, file: BinaryIO) -> Iterator[Any]:
    start = 0
    for number, line in enumerate(file, start=1):
        text = _text(path, line, start)
        if number == 1 and text.lstrip().startswith("["):
            raise ValueError(f"{path} is one JSON list, and .jsonl is one record a line; name the file .json")
        if text.strip():
            with at_place("", "; each line of a .jsonl file is one whole record"):
                row = parse_json(text, f"{path}, line {number}", constants=True)
            yield row
        start += len(line)


def _listed(path: Path, content: bytes) -> list[Any]:
    text = _text(path, content, 0)
    refuse((not text.strip(), f"{path} is empty; write a list of records"))
    try:
        rows = LENIENT_JSON.decode(text)
    except (RecursionError, ValueError) as error:  # or a key twice, a number that Python does not read
        line = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        words = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        words = "nested too deep" if isinstance(error, RecursionError) else words
        is_lines = words == "Extra data" and text.lstrip().startswith("{")
        suffix = f"use the suffix .jsonl for one record a line{', which this is' * is_lines}"
        raise ValueError(f"{path}{line}: invalid JSON ({words}); {suffix if line else 'correct the file'}") from None
    if not isinstance(rows, list):
        one = "; put it in brackets, or name the file .jsonl" if isinstance(rows, dict) else ""
        raise ValueError(f"{path} holds {shown(rows)}; a list of records is needed{one}")
    if "\\ud" in text or "\\uD" in text:
        for number, row in enumerate(rows):
            check_characters(row, f"{path}, record {record_id(row, number)!r}")
    return rows


def _text(path: Path, content: bytes, start: int) -> str:
    try:
        return content.decode("utf-8" if start else "utf-8-sig")
    except UnicodeDecodeError as error:
        byte = start + error.start + 3 * (len(error.object) < len(content))  # a byte-order mark
        raise ValueError(f"{path} is not UTF-8 text (byte {byte}); save it as UTF-8 JSON") from None


def opened(path: Path) -> BinaryIO:
    """Open a regular file; what gzip packed is unpacked in memory."""
    check_regular(path)
    if path.suffix.lower() != ZIPPED:
        return path.open("rb")
    try:
        with gzip.open(path) as file:
            content = file.read(MAX_UNPACKED + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be unpacked ({error}); fetch it again") from None
    refuse((len(content) > MAX_UNPACKED, f"{path} has more than {MAX_UNPACKED:,} bytes unpacked; run gunzip -k on it"))
    return io.BytesIO(content)


def _columnar_rows(path: Path) -> Iterator[dict[str, Any]]:
    from datasets import ClassLabel, Features

    check_regular(path)
    try:
        if file_kind(path) == ".parquet":
            table = pq.ParquetFile(path, memory_map=True)
            schema, batches = table.schema_arrow, table.iter_batches(batch_size=1000)
        else:
            batches = pa.ipc.open_stream(pa.memory_map(str(path)))
            schema = batches.schema
        features = Features.from_arrow_schema(schema).items()
        labels = {name: feature for name, feature in features if isinstance(feature, ClassLabel)}
        for row in chain.from_iterable(batch.to_pylist() for batch in batches):
            made = {name: _plain_value(value, path, name) for name, value in row.items()}
            for name, label in labels.items():
                made[name] = None if made[name] in (None, -1) else label.int2str(made[name])
            yield made
    except (pa.ArrowException, OSError, TypeError, KeyError) as error:
        raise ValueError(f"{path} cannot be read ({' '.join(str(error).split())[:160]}); fetch it again") from None


def _plain_value(value: Any, path: Path, column: str) -> Any:
    if isinstance(value, bytes):
        raise ValueError(f"{path}: column {shown(column)} holds bytes, as of pictures; save them (docs/own_data.md)")
    if isinstance(value, dict):
        return {name: _plain_value(each, path, column) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain_value(each, path, column) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def kept_rows(generate: Callable[[], Iterator[dict[str, Any]]], columns: Mapping[str, Kind], name: str) -> "Dataset":
    """Return what ``generate`` yields, kept in the datasets library's cache by a name for all it depends on."""
    from datasets import Dataset, Features, List, Value, config
    from datasets.exceptions import DatasetGenerationError

    try:
        kinds = {key: Value(kind) if isinstance(kind, str) else List(Value(*kind)) for key, kind in columns.items()}
        return Dataset.from_generator(generate, features=Features(kinds), fingerprint=name)
    except DatasetGenerationError as error:
        raise error.__cause__ or error from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        raise ValueError(f"{config.HF_DATASETS_CACHE} takes no locks; export HF_DATASETS_CACHE=FOLDER") from None
    except pa.ArrowInvalid as error:
        kept = config.HF_DATASETS_CACHE
        raise ValueError(f"rows kept below {kept} cannot be read ({error}); delete {kept}/generator") from None
