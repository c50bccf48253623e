r"""LLaVA's instruction format, and where each record of a file begins and ends, how large it is, which images it names.

A record is ``{"id": ..., "image": "a.jpg" | ["a.jpg", ...], "kind": ..., "conversations": [{"from": "human", "value":
"<image>\n..."}, {"from": "gpt", "value": "..."}, ...]}``; ``image`` and ``kind`` may be absent. As in LLaVA's own
training, what gpt says before the first human turn is left out (ShareGPT's records have such turns), and so is a last
human turn that nobody answers.

The index of a large file, an Arrow table, is made once (every record is parsed and checked), written to the cache of
the datasets library and memory-mapped from then on: opening it reads nothing, and all processes of a machine share its
pages. It is made anew when the file's size or date changes. Small files are indexed in memory each time.

Legend: R records, I images that they name.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from filelock import FileLock
from numpy.typing import NDArray

from subtoken_train.datasets.json_scan import scan_records
from subtoken_train.typed import shown

IMAGE_PLACEHOLDER = "<image>"
SMALL_FILE = 2**24  # bytes; below, making the index takes a fraction of a second
_LAYOUT = "2"  # raise it when the columns, or the checks of a record, change


def record_id(row: Any, index: int) -> str:
    """The record's own id as text, or its place in the file."""
    return str(row.get("id", index) if isinstance(row, dict) else index)


def image_names(row: dict[str, Any]) -> list[str]:
    """Its images; none for a text-only record."""
    images = row.get("image") or []
    return [images] if isinstance(images, str) else images


def used_turns(row: dict[str, Any]) -> list[dict[str, str]]:
    """Its turns from the first one of human to the last one of gpt."""
    roles = [message.get("from") for message in row["conversations"]]
    start = next((place for place, role in enumerate(roles) if role != "gpt"), len(roles))
    turns: list[dict[str, str]] = row["conversations"][start:]
    return turns[:-1] if len(turns) % 2 and turns[-1].get("from") == "human" else turns


def text_length(row: dict[str, Any]) -> int:
    """Characters of its turns, without placeholders and the white space around them."""
    return sum(len(message["value"].replace(IMAGE_PLACEHOLDER, "").strip()) for message in used_turns(row))


def record_problem(row: Any) -> str | None:
    """What is wrong with a record and what to do about it; None when nothing is."""
    if not isinstance(row, dict) or not isinstance(row.get("conversations"), list) or not row["conversations"]:
        return 'it has no turns; a record is {"id", "image", "conversations": [{"from", "value"}, ...]}'
    names = image_names(row)
    if not isinstance(names, list) or not all(isinstance(name, str) and "\0" not in name for name in names):
        return f"image is {shown(row['image'])}; a path or a list of paths is needed"
    messages = row["conversations"]
    if not all(isinstance(m, dict) and isinstance(m.get("value"), str) for m in messages):
        return 'a turn is not {"from": ..., "value": text}'
    used = used_turns(row)
    if not used or [message.get("from") for message in used] != ["human", "gpt"] * (len(used) // 2):
        roles = ", ".join(str(message.get("from")) for message in messages)
        return f"turns come from {roles}; they must alternate human, gpt and end with gpt"
    if not isinstance(row.get("kind"), str | None):
        return f"kind is {shown(row['kind'])}; a text is needed"
    return _placeholder_problem(used, len(names))


def _placeholder_problem(messages: list[dict[str, str]], num_images: int) -> str | None:
    counts = [message["value"].count(IMAGE_PLACEHOLDER) for message in messages]
    if any(counts[1::2]):
        return f"a gpt turn holds {IMAGE_PLACEHOLDER}; images belong in human turns"
    if sum(counts) == num_images:
        return None
    if num_images == 0:
        return f"{sum(counts)} {IMAGE_PLACEHOLDER} but no image; add the image's path or remove the placeholder"
    return (
        f"{sum(counts)} {IMAGE_PLACEHOLDER} for {num_images} image(s); write exactly one per image in the human turns"
    )


class RecordIndex:
    """The columns of one index, as arrays; all but ``images_R`` are views of it.

    Args:
        table: one Arrow record batch, see ``build_table``.

    Attributes:
        start_R: first byte of each record, int64.
        stop_R: the byte after its last, int64.
        images_R: images that it names, int32.
        characters_R: characters of its turns without placeholders, int64.
    """

    def __init__(self, table: pa.RecordBatch) -> None:
        self.start_R: NDArray[np.int64] = table.column("start").to_numpy()
        self.stop_R: NDArray[np.int64] = table.column("stop").to_numpy()
        self.characters_R: NDArray[np.int64] = table.column("characters").to_numpy()
        self._names = table.column("images")
        self.images_R: NDArray[np.int32] = np.diff(self._names.offsets.to_numpy())

    def __len__(self) -> int:
        return len(self.start_R)

    def image_names(self) -> pa.Array:
        """The names of all images, each once, in the order of the file: an Arrow array of strings."""
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

    name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]
    return Path(config.HF_DATASETS_CACHE) / "subtoken_train_records" / f"{name}.arrow"


def file_state(path: Path | int) -> bytes:
    """What an index stands for: layout, size and date (ns) of a file, by its path or descriptor."""
    stat = os.stat(path)
    return f"{_LAYOUT} {stat.st_size} {stat.st_mtime_ns}".encode()


def build_table(path: Path) -> pa.RecordBatch:
    """Parse and check every record; columns ``start``, ``stop``, ``characters`` (int64), ``images`` (list of names)."""
    start, stop, characters = array("q"), array("q"), array("q")
    record_ends, name_ends, names = array("i", [0]), array("q", [0]), bytearray()  # flat: no object per record
    for place, (begin, end, row) in enumerate(scan_records(path)):
        if problem := record_problem(row):
            raise ValueError(f"{path}, record {record_id(row, place)!r}: {problem}")
        start.append(begin)
        stop.append(end)
        characters.append(text_length(row))
        for name in image_names(row):
            names += name.encode()
            name_ends.append(len(names))
        record_ends.append(len(name_ends) - 1)
    if not start:
        raise ValueError(f"{path} holds no record; at least one is needed")
    texts = pa.LargeStringArray.from_buffers(len(name_ends) - 1, pa.py_buffer(name_ends), pa.py_buffer(names))
    offsets = pa.Array.from_buffers(pa.int32(), len(record_ends), [None, pa.py_buffer(record_ends)])
    columns = {
        name: pa.Array.from_buffers(pa.int64(), len(start), [None, pa.py_buffer(values)])
        for name, values in (("start", start), ("stop", stop), ("characters", characters))
    }
    return pa.RecordBatch.from_pydict({**columns, "images": pa.ListArray.from_arrays(offsets, texts)})


def _write(table: pa.RecordBatch, path: Path, state: bytes) -> None:
    """The file appears whole or not at all."""
    partial = path.with_suffix(".partial")
    table = table.replace_schema_metadata({"state": state})
    with partial.open("wb") as file:
        with pa.ipc.new_file(file, table.schema) as writer:
            writer.write_batch(table)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _open(path: Path) -> pa.ipc.RecordBatchFileReader:
    try:
        return pa.ipc.open_file(pa.memory_map(str(path)))
    except pa.ArrowInvalid as error:
        raise ValueError(f"the index {path} cannot be read ({error}); delete it, and it is made anew") from None
