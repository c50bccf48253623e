"""Reads the rows of files of every kind that data come in: JSON, JSON lines, Parquet, Arrow (``save_to_disk``), gzip.

Rows of Parquet and Arrow come as JSON's would: labels that ``datasets`` counts by their names, dates as texts. A set in
several files, ``train-00000-of-00002.parquet`` and so on, is read as one by the name of any of them.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from subtoken_train.documents import LENIENT_JSON, check_characters, check_regular, parse_json
from subtoken_train.outputs import NO_LOCKS
from subtoken_train.typed import shown

if TYPE_CHECKING:
    from datasets import Dataset

ZIPPED = ".gz"
COLUMNAR = (".parquet", ".arrow")
MAX_UNPACKED = 2**28
"""Bytes of a file of gzip's once it is unpacked."""
_TOGETHER = 1000
_BLOCK = 2**22  # bytes read at a time
_BOM = codecs.BOM_UTF8  # some editors begin a file with it
_TAIL = 16  # characters; an error in a block's last ones may mean that it was cut: "-Infinity", "\ud83d\u"
_SPACE = re.compile(r"[ \t\n\r]*")
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})(?=\.)")


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
    found = _SHARD.search(path.name)
    if found is None:
        return [path]
    files = [path.with_name(_SHARD.sub(f"-{part:05d}-of-{found[2]}", path.name)) for part in range(int(found[2]))]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ValueError(f"{path} is one of {len(files):,} files, and {missing[0]} is missing; fetch it again")
    return files


def read_rows(path: Path) -> Iterator[Any]:
    """Yield what the rows of a file, or set of files, hold."""
    for file in files_of_set(path):
        yield from columnar_rows(file) if file_kind(file) in COLUMNAR else scan_records(file)


def scan_records(path: Path) -> Iterator[Any]:
    """Yield all records of a file: ``.jsonl`` is one record a line, any other name one JSON list; a BOM is passed over.

    What gzip packed is read as what is inside.
    """
    check_regular(path)
    return _scan_lines(path) if file_kind(path) == ".jsonl" else _ListScanner(path).scan()


def _scan_lines(path: Path) -> Iterator[Any]:
    start = 0
    with opened(path) as file:
        for number, line in enumerate(file, start=1):
            begin = len(_BOM) if number == 1 and line.startswith(_BOM) else 0
            try:
                text = line[begin:].decode("utf-8")
                if number == 1 and text.lstrip().startswith("["):
                    raise ValueError(f"{path} is one JSON list, and .jsonl is one record a line; name the file .json")
                if text.strip():
                    yield _parsed(text, f"{path}, line {number}")
            except UnicodeDecodeError as error:
                raise _not_utf8(path, start + begin + error.start) from None
            start += len(line)


def _parsed(text: str, place: str) -> Any:
    try:
        return parse_json(text, place, constants=True)
    except ValueError as error:
        raise ValueError(f"{error}; each line of a .jsonl file is one whole record") from None


class _ListScanner:
    """A window of text that moves over the file: ``text[place]`` is the next character.

    A set of a million records is often one list on a single line; it is read a block at a time, in bounded memory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text, self.place, self.line = "", 0, 1
        self._bytes_read = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def scan(self) -> Iterator[Any]:
        with opened(self.path) as self._file:
            if self._file.read(len(_BOM)) == _BOM:
                self._bytes_read = len(_BOM)
            else:
                self._file.seek(0)
            if self._peek() != "[":
                raise self._no_list()
            self.place += 1
            if self._peek() != "]":
                yield self._value()
                while self._peek() == ",":
                    self.place += 1
                    self._peek()
                    yield self._value()
            if self._peek() != "]":
                raise self._invalid("Expecting ',' delimiter", self.place)
            self.place += 1
            if self._peek():
                raise self._invalid("Extra data", self.place)

    def _peek(self) -> str:
        """Return the next character that is no white space; empty at the end of the file."""
        while True:
            space = _SPACE.match(self.text, self.place)
            assert space is not None
            self.place = space.end()
            if self.place < len(self.text):
                return self.text[self.place]
            if not self._read_more():
                return ""

    def _value(self) -> Any:
        """Return the JSON value that starts here."""
        while True:
            try:
                row, end = LENIENT_JSON.raw_decode(self.text, self.place)
            except json.JSONDecodeError as error:
                cut = error.pos > len(self.text) - _TAIL or error.msg.startswith("Unterminated string")
                if cut and self._read_more():
                    continue
                raise self._invalid(error.msg, error.pos) from None
            except RecursionError:
                raise self._invalid("nested too deep", self.place) from None
            except ValueError as error:  # a key twice, a number that Python does not read
                raise self._invalid(str(error), self.place) from None
            if isinstance(row, int | float) and end >= len(self.text) - 2 and self._read_more():
                continue  # "1.5e+" is a number and the beginning of a longer one
            if max(self.text.find(half, self.place, end) for half in ("\\ud", "\\uD")) >= 0:
                check_characters(row, f"{self.path}, line {self.line + self.text.count(chr(10), 0, self.place)}")
            self.place = end
            return row

    def _read_more(self) -> bool:
        """Append a block, of twice what is left, so that a long record costs linear time.

        False at the end of the file, where nothing is changed.
        """
        left = self.text[self.place :]
        block = self._file.read(max(_BLOCK, 2 * len(left)))
        try:
            more = self._decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            held = len(error.object) - len(block)  # bytes of a character that the last block began
            raise _not_utf8(self.path, self._bytes_read - held + error.start) from None
        if not block:
            return False
        self._bytes_read += len(block)
        self.line += self.text.count("\n", 0, self.place)
        self.text, self.place = left + more, 0
        return True

    def _invalid(self, problem: str, place: int) -> ValueError:
        line = self.line + self.text.count("\n", 0, place)
        hint = "use the suffix .jsonl for one record a line"
        return ValueError(f"{self.path}, line {line}: invalid JSON ({problem}); {hint}")

    def _no_list(self) -> ValueError:
        row = self._value()
        if self._peek() == "{" and isinstance(row, dict):
            problem = self._invalid("Extra data", self.place)
            return ValueError(f"{problem}, which this is")
        if self._peek():
            return self._invalid("Extra data", self.place)
        one = "; put it in brackets, or name the file .jsonl" if isinstance(row, dict) else ""
        return ValueError(f"{self.path} holds {shown(row)}; a list of records is needed{one}")


def _not_utf8(path: Path, byte: int) -> ValueError:
    return ValueError(f"{path} is not UTF-8 text (byte {byte}); save it as UTF-8 JSON")


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
    if len(content) > MAX_UNPACKED:
        raise ValueError(
            f"{path} has more than {MAX_UNPACKED:,} bytes once it is unpacked; gunzip -k {path} unpacks it"
        )
    return io.BytesIO(content)


def columnar_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet or Arrow file as JSON's values, some at a time."""
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


def kept_rows(generate: Callable[[], Iterator[dict[str, Any]]], features: dict[str, Any], name: str) -> Dataset:
    """Return what ``generate`` yields, kept in the cache of the datasets library and mapped from there.

    Args:
        generate: yields rows; not called where they are kept.
        features: the columns of a row, as ``datasets`` describes them.
        name: of all that the rows depend on.
    """
    from datasets import Dataset, Features, config
    from datasets.exceptions import DatasetGenerationError

    try:
        return Dataset.from_generator(generate, features=Features(features), fingerprint=name)
    except DatasetGenerationError as error:
        raise error.__cause__ or error from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        raise ValueError(
            f"{config.HF_DATASETS_CACHE} lies on a file system without locks; name another for the cache: export "
            "HF_DATASETS_CACHE=FOLDER"
        ) from None
    except pa.ArrowInvalid as error:
        raise ValueError(
            f"rows kept below {config.HF_DATASETS_CACHE} cannot be read ({error}); delete {config.HF_DATASETS_CACHE}/"
            "generator, and they will be made again"
        ) from None
