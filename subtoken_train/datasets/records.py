r"""Instruction data in LLaVA's format: a JSON list (or JSON lines) of conversations beside a folder of images.

A record is ``{"id": ..., "image": "a.jpg" | ["a.jpg", ...], "kind": ..., "conversations": [{"from": "human", "value":
"<image>\n..."}, {"from": "gpt", "value": "..."}, ...]}``; ``image`` and ``kind`` may be absent. The structure of every
record is checked when the file is read; images are opened one by one, when a batch needs them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError
from torch.utils.data import Dataset

from subtoken_train.backbones.base import Turn

IMAGE_PLACEHOLDER = "<image>"


@dataclass(frozen=True)
class Record:
    """One conversation.

    Attributes:
        id: the record's own id (its position in the file where it has none), as text.
        image_paths: its images, in the order of their placeholders; empty for a text-only record.
        turns: its exchanges; each prompt holds one ``<image>`` per image.
        kind: question kind, for scores by kind; None where the file names none.
    """

    id: str
    image_paths: list[Path]
    turns: list[Turn]
    kind: str | None = None


class InstructionRecords(Dataset[Record]):
    """The records of one file. Only the parsed JSON is held in memory.

    Args:
        path: ``.jsonl`` (one record a line) or any other name (one JSON list).
        image_folder: where image paths start; default: the file's own folder.

    Raises:
        ValueError: the file is missing, is not valid JSON or holds no record, or a record breaks the format.
    """

    def __init__(self, path: str | Path, image_folder: str | Path | None = None) -> None:
        self.path = Path(path)
        self.image_folder = self.path.parent if image_folder is None else Path(image_folder)
        self._rows = _read_rows(self.path)
        for index, row in enumerate(self._rows):
            if problem := _problem(row):
                raise ValueError(f"{self.path}, record {_record_id(row, index)!r}: {problem}")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Record:
        row = self._rows[index]
        values = [message["value"] for message in row["conversations"]]
        turns = [Turn(prompt, answer) for prompt, answer in zip(values[::2], values[1::2], strict=True)]
        paths = [self.image_folder / name for name in _image_names(row)]
        return Record(_record_id(row, index), paths, turns, row.get("kind"))

    def sizes(self) -> list[tuple[int, int]]:
        """(images, characters of text without placeholders) of every record; no image is opened."""
        texts = [[message["value"] for message in row["conversations"]] for row in self._rows]
        characters = [sum(len(text.replace(IMAGE_PLACEHOLDER, "").strip()) for text in turns) for turns in texts]
        return [(len(_image_names(row)), size) for row, size in zip(self._rows, characters, strict=True)]


def open_image(path: Path, record_id: str | None = None) -> Image.Image:
    """Read one image, of a record or alone, as RGB.

    Raises:
        ValueError: the file is missing or is not a readable image.
    """
    of_record = "" if record_id is None else f"record {record_id!r}: "
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except FileNotFoundError:
        hint = "check image_folder, or fetch the images the data set lists" if of_record else "check the path"
        raise ValueError(f"{of_record}image {path} does not exist; {hint}") from None
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        hint = "replace the file or drop the record" if of_record else "replace the file"
        raise ValueError(f"{of_record}image {path} cannot be read ({error}); {hint}") from None


def _read_rows(path: Path) -> list[Any]:
    """Parse the file; one worded error per way it can be wrong."""
    if not path.is_file():
        makes = "; `subtoken-train data scenes` makes it" if "data/scenes" in path.as_posix() else ""
        raise ValueError(f"data file {path} does not exist{makes or '; check the path'}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8 JSON") from None
    rows = list(_parse_lines(text.split("\n"), path)) if path.suffix == ".jsonl" else _parse_list(text, path)
    if not rows:
        raise ValueError(f"{path} holds no record; at least one is needed")
    return rows


def _parse_list(text: str, path: Path) -> list[Any]:
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        hint = "use the suffix .jsonl for one record a line"
        raise ValueError(f"{path}, line {error.lineno}: invalid JSON ({error.msg}); {hint}") from None
    if not isinstance(rows, list):
        raise ValueError(f"{path} holds a JSON {type(rows).__name__}; a list of records is needed")
    return rows


def _parse_lines(lines: Iterable[str], path: Path) -> Iterator[Any]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            hint = "each line of a .jsonl file is one whole record"
            raise ValueError(f"{path}, line {number}: invalid JSON ({error.msg}); {hint}") from None


def _record_id(row: Any, index: int) -> str:
    return str(row.get("id", index) if isinstance(row, dict) else index)


def _image_names(row: dict[str, Any]) -> list[str]:
    images = row.get("image") or []
    return [images] if isinstance(images, str) else images


def _problem(row: Any) -> str | None:
    """What is wrong with a record and what to do about it; None when nothing is."""
    if not isinstance(row, dict) or not isinstance(row.get("conversations"), list) or not row["conversations"]:
        return 'it has no turns; a record is {"id", "image", "conversations": [{"from", "value"}, ...]}'
    if not all(isinstance(name, str) for name in _image_names(row)):
        return f"image is {row['image']!r}; a path or a list of paths is needed"
    messages = row["conversations"]
    if not all(isinstance(m, dict) and isinstance(m.get("value"), str) for m in messages):
        return 'a turn is not {"from": ..., "value": text}'
    roles = [message.get("from") for message in messages]
    if roles != ["human", "gpt"] * (len(roles) // 2):
        return f"turns come from {', '.join(map(str, roles))}; they must alternate human, gpt and end with gpt"
    return _placeholder_problem(messages, len(_image_names(row)))


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
