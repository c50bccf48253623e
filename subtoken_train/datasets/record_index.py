"""Where each record of a file of conversations begins and ends, how large it is, which images it names.

The index of a large file, an Arrow table, is made once (every record is parsed and checked), written to the cache of
the datasets library and memory-mapped from then on: opening it reads nothing, and all processes of a machine share its
pages. It is made anew when the file's size or date changes. Small files are indexed in memory each time.

Legend: R records, I images that they name.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from filelock import FileLock
from numpy.typing import NDArray

from subtoken_train.datasets.conversations import llava_form
from subtoken_train.datasets.json_scan import scan_records
from subtoken_train.datasets.record_format import image_names, record_id, record_problem, text_length, video_names
from subtoken_train.documents import real_path
from subtoken_train.outputs import whole_file

SMALL_FILE = 2**24  # bytes; below, making the index takes a fraction of a second
_LAYOUT = "6"  # raise it when the columns, or the checks of a record, change


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
        self._unread = pa.array(json.loads((table.schema.metadata or {}).get(b"unread", b"[]")), pa.string())
        self._names = table.column("images")

    def __len__(self) -> int:
        return len(self.start_R)

    @property
    def unread(self) -> list[str]:
        """The names of fields that nobody reads, sorted."""
        names: list[str] = self._unread.to_pylist()
        return names

    def image_names(self) -> pa.Array:
        """Return the names of all images, frames and folders of frames (``clip/``), each once, in the file's order."""
        return self._names.values.unique()


def open_index(path: Path) -> RecordIndex:
    """The index of a data file, from the cache where it is there and the file has not changed since.

    Raises:
        ValueError: the file is missing, is not valid JSON or holds no record, or a record breaks the format.
    """
    if not path.is_file():
        makes = "; `subtoken-train data scenes` makes it" if "data/scenes" in path.as_posix() else ""
        raise ValueError(f"data file {path} does not exist{makes or '; check the path'}")
    if path.stat().st_size < SMALL_FILE:
        return RecordIndex(build_table(path))
    cached, state = index_path(path), file_state(path)
    cached.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{cached}.lock"):  # the first of several processes makes it, the others wait
        if not cached.is_file() or _open(cached).schema.metadata.get(b"state") != state:
            _write(build_table(path), cached, state)
        return RecordIndex(_open(cached).get_batch(0))


def index_path(path: Path) -> Path:
    """Where the index of a large file is kept: one place per data file, so that nothing outdated stays."""
    from datasets import config

    name = hashlib.sha256(str(real_path(path)).encode()).hexdigest()[:32]
    return Path(config.HF_DATASETS_CACHE) / "subtoken_train_records" / f"{name}.arrow"


def file_state(path: Path | int) -> bytes:
    """What an index stands for: layout, size and date (ns) of a file, by its path or descriptor."""
    stat = os.stat(path)
    return f"{_LAYOUT} {stat.st_size} {stat.st_mtime_ns}".encode()


def build_table(path: Path) -> pa.RecordBatch:
    """Parse and check every record, into columns of int64 and ``images`` (list of names; folders end with a slash)."""
    unread: set[str] = set()
    start, stop, characters, pictures, of_videos = (array("q") for _ in range(5))
    record_ends, name_ends, names = array("i", [0]), array("q", [0]), bytearray()  # flat: no object per record
    for place, (begin, end, found) in enumerate(scan_records(path)):
        row = checked_record(found, f"{path}, record {record_id(found, place)!r}", unread)
        start.append(begin)
        stop.append(end)
        characters.append(text_length(row))
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
        raise ValueError(f"{path} holds no record; at least one is needed")
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
    return table.replace_schema_metadata({"unread": json.dumps(sorted(unread))})


def checked_record(row: Any, place: str, unread: set[str], as_document: bool = False) -> dict[str, Any]:
    """Return a record in LLaVA's form, whatever form of ``conversations`` it has.

    Args:
        row: as it stands in the file.
        place: where, for messages.
        unread: gets the names of its fields that nobody reads.
        as_document: see ``record_problem``.

    Raises:
        ValueError: it breaks the format, or has a field that changes what is learnt or seen and is not read.
    """
    try:
        made = llava_form(row, unread)
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
        raise ValueError(f"the index {path} cannot be read ({error}); delete it, and it is made anew") from None
