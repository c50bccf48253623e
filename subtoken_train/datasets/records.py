"""Instruction data: a file of conversations beside a folder of images, as one Arrow table of checked records.

A large file's table is kept by the datasets library, memory-mapped; images are opened when needed. Legend: R records.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from torch.utils.data import Dataset

from subtoken_train.datasets import record_format as form
from subtoken_train.datasets.conversations import checked_record
from subtoken_train.datasets.image_sources import FolderImages, PictureSource, VideoSource, compare_images, inside
from subtoken_train.datasets.known_files import absent
from subtoken_train.datasets.row_files import Kind, file_kind, files_of_set, kept_rows, placed_rows
from subtoken_train.datasets.unknown_tokens import SomeTexts, spread
from subtoken_train.documents import real_path
from subtoken_train.errors import at_place, refuse
from subtoken_train.families.literal_marks import with_marks
from subtoken_train.types import Turn

SMALL_FILE = 2**24  # bytes; below, making the table takes a fraction of a second
_LAYOUT = "10"  # raise it when the columns, or the checks of a record, change
_COLUMNS: dict[str, Kind] = {
    "row": "large_string",
    **dict.fromkeys(("characters", "pictures", "videos"), "int64"),
    **dict.fromkeys(("images", "in_texts"), ("string",)),
}


@dataclass(frozen=True)
class Record:
    """One conversation of a data file."""

    id: str  # the record's own id (its position in the file where it has none), as text
    images: list[PictureSource]  # images and videos in the order of their placeholders; empty for a text-only record
    turns: list[Turn]  # its exchanges; each prompt holds one ``<image>`` per image and per video
    kind: str | None = None  # question kind, for scores by kind; None where the file names none


def turns_of(row: dict[str, Any]) -> list[Turn]:
    """Return the exchanges of a record in LLaVA's form, with ``<image>`` for each video, too."""
    video = form.IMAGE_PLACEHOLDER if form.video_names(row) else form.VIDEO_PLACEHOLDER
    texts = [with_marks(turn["value"], form.IMAGE_PLACEHOLDER, video) for turn in form.used_turns(row)]
    learnt = map(form.answer_is_learnt, form.used_turns(row)[1::2])
    return [Turn(*each) for each in zip(texts[::2], texts[1::2], learnt, strict=True)]


class InstructionRecords(Dataset[Record]):
    """The records of one file of any kind of ``row_files``, which may be sent to workers, and their images' folder."""

    def __init__(
        self, path: str | Path, image_folder: str | Path | None = None, images_outside_folder: bool = False
    ) -> None:
        self.path, self.images_outside_folder = Path(path), images_outside_folder
        self.image_folder = self.path.parent if image_folder is None else Path(image_folder)
        self._table, self._state = _open_table(self.path), _file_state(self.path)
        named = self._table["in_texts"].combine_chunks()
        for index in pc.unique(pc.list_parent_indices(named)).to_pylist():
            name = f"{self.path}, record {form.record_id(self._row(index), index)!r}"
            form.refuse_files(named[index].as_py(), name, self.image_folder)

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a worker open the file anew."""
        arguments = self.path.absolute(), self.image_folder.absolute(), self.images_outside_folder
        return _opened_anew, (arguments, self._state)

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Record:
        row = self._row(index)
        name = form.record_id(row, index)
        with at_place(f"record {name!r}: "):
            images = map(self._inside, form.image_names(row))
            frames = form.video_names(row)
            named = (self._inside(x) if isinstance(x, str) else tuple(map(self._inside, x)) for x in frames)
            videos = (VideoSource(x, float(row.get("fps", 1.0)), self.images_outside_folder) for x in named)
            marked = form.pictures_marked(row)
            pictures: list[PictureSource] = [next(videos) if video else next(images) for video in marked]
        return Record(name, pictures, turns_of(row), row.get("kind"))

    def first_with(self, videos: bool) -> str | None:
        """Return the id of the first record with a video, or with an image; None where none has one."""
        count_R = self._counts("videos")
        found = np.flatnonzero(count_R if videos else self._counts("pictures") - count_R)
        return self[int(found[0])].id if len(found) else None

    def sizes(self) -> NDArray[np.int64]:
        """Return (images and videos, characters without placeholders) of every record, [R, 2]; no image is opened."""
        return np.stack([self._counts("pictures"), self._counts("characters")], axis=1)

    def some_texts(self, limit: int | None = None) -> SomeTexts:
        """Return what is said in some of the first ``limit`` records (None: all), evenly spread; no image is opened."""
        total = len(self) if limit is None else min(limit, len(self))
        said = ((row, [turn["value"] for turn in form.used_turns(row)]) for row in map(self._row, spread(total)))
        texts = ["\n".join(form.without_placeholders(row, text) for text in values) for row, values in said]
        return SomeTexts(texts, total)

    def compare_images(self) -> list[FolderImages]:
        """Find which of the images that records name are in ``image_folder``, by the listings of its folders."""
        names = pc.unique(pc.list_flatten(self._table["images"])).to_pylist()
        return compare_images(names, self.image_folder, self.images_outside_folder)

    def _inside(self, name: str) -> Path:
        return inside(self.image_folder, name, self.images_outside_folder)

    def _row(self, index: int) -> dict[str, Any]:
        return dict(json.loads(self._table["row"][index].as_py()))

    def _counts(self, column: str) -> NDArray[np.int64]:
        counts: NDArray[np.int64] = self._table[column].to_numpy()
        return counts


def _opened_anew(arguments: tuple[Any, ...], state: str) -> InstructionRecords:
    refuse((_file_state(arguments[0]) != state, f"{arguments[0]} was changed while it was in use; start again"))
    return InstructionRecords(*arguments)


def _open_table(path: Path) -> pa.Table:
    if not path.exists():
        raise absent("data file", path)
    if file_kind(path) in (".csv", ".tsv"):
        raise ValueError(f"{path} is a table; this makes records of it: subtoken-train init {path.parent}")
    if sum(file.stat().st_size for file in files_of_set(path)) < SMALL_FILE:
        kinds = {name: pa.type_for_alias(kind if isinstance(kind, str) else kind[0]) for name, kind in _COLUMNS.items()}
        listed = [(name, kind if isinstance(_COLUMNS[name], str) else pa.list_(kind)) for name, kind in kinds.items()]
        return pa.Table.from_pylist(list(_described(path)), pa.schema(listed))
    return kept_rows(partial(_described, path), _COLUMNS, _file_state(path)).data.table


def _file_state(path: Path) -> str:
    """Return what a table stands for: layout, path, sizes and dates (ns) of its files."""
    stats = [(str(real_path(file)), file.stat().st_size, file.stat().st_mtime_ns) for file in files_of_set(path)]
    return hashlib.sha256(repr((_LAYOUT, stats)).encode()).hexdigest()[:32]


def _described(path: Path) -> Iterator[dict[str, Any]]:
    for place, found in placed_rows(path):
        row = checked_record(found, place)
        videos = form.video_names(row)
        folders = [video.rstrip("/") + "/" for video in videos if isinstance(video, str)]
        frames = [frame for video in videos if not isinstance(video, str) for frame in video]
        yield {
            "row": json.dumps(row, ensure_ascii=False),
            "characters": sum(len(form.without_placeholders(row, turn["value"])) for turn in form.used_turns(row)),
            "pictures": len(form.image_names(row)) + len(videos),
            "videos": len(videos),
            "images": [*form.image_names(row), *folders, *frames],
            "in_texts": form.files_named(row),
        }
