"""Index of a file of conversations: each record's place, size and images; and the scan that finds the records.

The index of a large file, an Arrow table, is made once (every record is parsed and checked), written to the cache of
the datasets library and memory-mapped from then on: opening it reads nothing, and all processes of a machine share its
pages. It is made anew when the file's size or date changes. Small files are indexed in memory each time.

A data set of a million records is often one JSON list on a single line. It is read a block at a time, in bounded
memory; what a place names, ``file[start:stop]``, is the text of one whole record.

Legend: R records, I images that they name.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

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
from subtoken_train.datasets.row_files import COLUMNAR, ZIPPED, columnar_rows, file_kind, files_of_set, opened
from subtoken_train.datasets.text_media import files_named
from subtoken_train.documents import LENIENT_JSON, check_characters, check_regular, parse_json, real_path
from subtoken_train.outputs import locked, whole_file
from subtoken_train.typed import shown

_BLOCK = 2**22  # bytes read at a time
_BOM = codecs.BOM_UTF8  # some editors begin a file with it
_TAIL = 16  # characters; an error in a block's last ones may mean that it was cut: "-Infinity", "\ud83d\u"
_SPACE = re.compile(r"[ \t\n\r]*")


class Found(NamedTuple):
    """One record: the bytes ``start`` to ``stop`` (exclusive) of the file, and what they hold."""

    start: int
    stop: int
    row: Any


def read_rows(path: Path) -> Iterator[Any]:
    """Yield what the rows of a file, or set of files, of any kind of ``row_files`` hold.

    Raises:
        ValueError: see ``scan_records`` and ``columnar_rows``.
    """
    for file in files_of_set(path):
        yield from columnar_rows(file) if file_kind(file) in COLUMNAR else (found.row for found in scan_records(file))


def json_file(path: Path) -> Path:
    """Return a plain file of JSON as it is; of another kind the JSON lines that are made of it, kept in the cache.

    Raises:
        ValueError: it is missing or broken.
    """
    if not path.exists():
        raise absent("data file", path)
    if file_kind(path) in (".csv", ".tsv"):
        raise ValueError(f"{path} is a table; this makes records of it: subtoken-train init {path.parent}")
    files = files_of_set(path)
    if files == [path] and path.suffix.lower() not in (ZIPPED, *COLUMNAR):
        return path
    states = b" ".join(map(file_state, files))
    made = index_path(path).with_suffix(f".{hashlib.sha256(states).hexdigest()[:16]}.jsonl")
    made.parent.mkdir(parents=True, exist_ok=True)
    with locked(Path(f"{index_path(path)}.lock")):
        if not made.is_file():
            with whole_file(made) as temporary, temporary.open("w", encoding="utf-8") as lines:
                lines.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in read_rows(path))
    return made


def scan_records(path: Path) -> Iterator[Found]:
    """Yield all records of a file: ``.jsonl`` is one record a line, any other name one JSON list; a BOM is passed over.

    What gzip packed is read as what is inside.

    Raises:
        ValueError: the text is not UTF-8, not JSON, or not a list, or it is of the other kind; the line is named.
    """
    check_regular(path)
    return _scan_lines(path) if file_kind(path) == ".jsonl" else _ListScanner(path).scan()


def _scan_lines(path: Path) -> Iterator[Found]:
    start = 0
    with opened(path) as file:
        for number, line in enumerate(file, start=1):
            begin = start + (len(_BOM) if number == 1 and line.startswith(_BOM) else 0)
            end = start + len(line)
            try:
                text = line[begin - start :].decode("utf-8")
                if start == 0 and text.lstrip().startswith("["):
                    raise ValueError(f"{path} is one JSON list, and .jsonl is one record a line; name the file .json")
                if text.strip():
                    yield Found(begin, end, _parsed(text, f"{path}, line {number}"))
            except UnicodeDecodeError as error:
                raise _not_utf8(path, begin + error.start) from None
            start = end


def _parsed(text: str, place: str) -> Any:
    try:
        return parse_json(text, place, constants=True)
    except ValueError as error:
        raise ValueError(f"{error}; each line of a .jsonl file is one whole record") from None


class _ListScanner:
    """A window of text that moves over the file: ``text[place]`` is the next character, ``byte`` its byte."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text, self.place, self.byte, self.line = "", 0, 0, 1
        self._bytes_read = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def scan(self) -> Iterator[Found]:
        with opened(self.path) as self._file:
            if self._file.read(len(_BOM)) == _BOM:
                self.byte = self._bytes_read = len(_BOM)
            else:
                self._file.seek(0)
            if self._peek() != "[":
                raise self._no_list()
            self._advance(self.place + 1)
            if self._peek() != "]":
                yield self._value()
                while self._peek() == ",":
                    self._advance(self.place + 1)
                    self._peek()
                    yield self._value()
            if self._peek() != "]":
                raise self._invalid("Expecting ',' delimiter", self.place)
            self._advance(self.place + 1)
            if self._peek():
                raise self._invalid("Extra data", self.place)

    def _peek(self) -> str:
        """Return the next character that is no white space; empty at the end of the file."""
        while True:
            space = _SPACE.match(self.text, self.place)
            assert space is not None
            self._advance(space.end())
            if self.place < len(self.text):
                return self.text[self.place]
            if not self._read_more():
                return ""

    def _value(self) -> Found:
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
            start = self.byte
            self._advance(end)
            return Found(start, self.byte, row)

    def _advance(self, place: int) -> None:
        passed = place - self.place
        self.byte += passed if self.text.isascii() else len(self.text[self.place : place].encode())
        self.place = place

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
        row = self._value().row
        if self._peek() == "{" and isinstance(row, dict):
            problem = self._invalid("Extra data", self.place)
            return ValueError(f"{problem}, which this is")
        if self._peek():
            return self._invalid("Extra data", self.place)
        one = "; put it in brackets, or name the file .jsonl" if isinstance(row, dict) else ""
        return ValueError(f"{self.path} holds {shown(row)}; a list of records is needed{one}")


def _not_utf8(path: Path, byte: int) -> ValueError:
    return ValueError(f"{path} is not UTF-8 text (byte {byte}); save it as UTF-8 JSON")


SMALL_FILE = 2**24  # bytes; below, making the index takes a fraction of a second
_LAYOUT = "7"  # raise it when the columns, or the checks of a record, change


class RecordIndex:
    """The columns of one index, as arrays that are views of it.

    Args:
        table: one Arrow record batch, see ``build_table``.

    Attributes:
        start_R: first byte of each record, int64.
        stop_R: the byte after its last, int64.
        images_R: images and videos that it names, int64.
        videos_R: videos among them, int64.
        characters_R: characters of its turns without placeholders, int64.
    """

    def __init__(self, table: pa.RecordBatch) -> None:
        self.start_R: NDArray[np.int64] = table.column("start").to_numpy()
        self.stop_R: NDArray[np.int64] = table.column("stop").to_numpy()
        self.characters_R: NDArray[np.int64] = table.column("characters").to_numpy()
        self.images_R: NDArray[np.int64] = table.column("pictures").to_numpy()
        self.videos_R: NDArray[np.int64] = table.column("videos").to_numpy()
        found = {key: json.loads(table.schema.metadata[key]) for key in (b"unread", b"in_texts")}
        self._unread = pa.array(found[b"unread"], pa.string())
        self._in_texts = pa.array(found[b"in_texts"], pa.list_(pa.string()))
        self._names = table.column("images")

    def __len__(self) -> int:
        return len(self.start_R)

    @property
    def unread(self) -> list[str]:
        """The names of fields that nobody reads, sorted."""
        names: list[str] = self._unread.to_pylist()
        return names

    @property
    def in_texts(self) -> list[tuple[str, str]]:
        """Files of media that texts name, of records that have none, each with the first such record."""
        return list(map(tuple, self._in_texts.to_pylist()))

    def image_names(self) -> pa.Array:
        """Return the names of all images, frames and folders of frames (``clip/``), each once, in the file's order."""
        return self._names.values.unique()


def open_index(path: Path, called: Path | None = None) -> RecordIndex:
    """Open the index of a data file, from the cache where it is there and the file has not changed since.

    Args:
        path: the file (``json_file``).
        called: its name in messages; default: ``path``.

    Raises:
        ValueError: the file is not valid JSON or holds no record, or a record breaks the format.
    """
    called = called or path
    if path.stat().st_size < SMALL_FILE:
        return RecordIndex(build_table(path, called))
    cached, state = index_path(path), file_state(path)
    cached.parent.mkdir(parents=True, exist_ok=True)
    with locked(Path(f"{cached}.lock")):  # the first of several processes makes it, the others wait
        if not cached.is_file() or _open(cached).schema.metadata.get(b"state") != state:
            _write(build_table(path, called), cached, state)
        return RecordIndex(_open(cached).get_batch(0))


def index_path(path: Path) -> Path:
    """Return where a large file's index is kept: one place per data file, so that nothing outdated stays."""
    from datasets import config

    name = hashlib.sha256(str(real_path(path)).encode()).hexdigest()[:32]
    return Path(config.HF_DATASETS_CACHE) / "subtoken_train_records" / f"{name}.arrow"


def file_state(path: Path | int) -> bytes:
    """Return what an index stands for: layout, size and date (ns) of a file, by its path or descriptor."""
    stat = os.stat(path)
    return f"{_LAYOUT} {stat.st_size} {stat.st_mtime_ns}".encode()


def build_table(path: Path, called: Path) -> pa.RecordBatch:
    """Parse and check every record, into columns of int64 and ``images`` (list of names; folders end with a slash)."""
    unread: set[str] = set()
    in_texts: dict[str, str] = {}
    start, stop, characters, pictures, of_videos = (array("q") for _ in range(5))
    record_ends, name_ends, names = array("i", [0]), array("q", [0]), bytearray()  # flat: no object per record
    for place, (begin, end, found) in enumerate(scan_records(path)):
        row = checked_record(found, f"{called}, record {record_id(found, place)!r}", unread)
        start.append(begin)
        stop.append(end)
        characters.append(text_length(row))
        for name in files_named(row, has_media(row)):
            in_texts.setdefault(name, record_id(found, place))
        videos = video_names(row)
        of_videos.append(len(videos))
        pictures.append(len(image_names(row)) + len(videos))
        folders = (video.rstrip("/") + "/" for video in videos if isinstance(video, str))
        frames = (frame for video in videos if not isinstance(video, str) for frame in video)
        for name in (*image_names(row), *folders, *frames):
            names += name.encode()
            name_ends.append(len(names))
        record_ends.append(len(name_ends) - 1)
    if not start:
        raise ValueError(f"{called} holds no record; at least one is needed")
    texts = pa.LargeStringArray.from_buffers(len(name_ends) - 1, pa.py_buffer(name_ends), pa.py_buffer(names))
    offsets = pa.Array.from_buffers(pa.int32(), len(record_ends), [None, pa.py_buffer(record_ends)])
    columns = {
        name: pa.Array.from_buffers(pa.int64(), len(start), [None, pa.py_buffer(values)])
        for name, values in (
            ("start", start),
            ("stop", stop),
            ("characters", characters),
            ("pictures", pictures),
            ("videos", of_videos),
        )
    }
    table = pa.RecordBatch.from_pydict({**columns, "images": pa.ListArray.from_arrays(offsets, texts)})
    notes = {"unread": json.dumps(sorted(unread)), "in_texts": json.dumps(list(in_texts.items()))}
    return table.replace_schema_metadata(notes)


def checked_record(row: Any, place: str, unread: set[str], as_document: bool = False) -> dict[str, Any]:
    """Return a record in LLaVA's form, whatever form of ``conversations`` it has.

    Args:
        row: as it stands in the file.
        place: where, for messages.
        unread: gets the names of its fields that nobody reads.
        as_document: see ``llava_form`` and ``record_problem``.

    Raises:
        ValueError: it breaks the format, or has a field that changes what is learnt or seen and is not read.
    """
    try:
        made = llava_form(row, unread, as_document)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    if problem := record_problem(made, as_document):
        raise ValueError(f"{place}: {problem}")
    checked: dict[str, Any] = made
    return checked


def _write(table: pa.RecordBatch, path: Path, state: bytes) -> None:
    """Write an index whole or not at all."""
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), "state": state})
    with whole_file(path) as temporary, temporary.open("wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_batch(table)


def _open(path: Path) -> pa.ipc.RecordBatchFileReader:
    try:
        return pa.ipc.open_file(pa.memory_map(str(path)))
    except pa.ArrowInvalid as error:
        raise ValueError(f"the index {path} cannot be read ({error}); delete it, and it will be rebuilt") from None
