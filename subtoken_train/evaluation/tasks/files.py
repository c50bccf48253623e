"""A task's files: texts, JSON, CSV and TSV in a folder, Parquet there or on the Hub; whether a set is whole.

Errors name file and line; images stay encoded until they are opened.
"""

import csv
import io
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
from datasets import Dataset, Image, List, load_dataset
from datasets.exceptions import DatasetNotFoundError, DatasetsError
from pyarrow import ArrowInvalid

from subtoken_train.datasets import image_sources as media
from subtoken_train.documents import check_regular, parse_json
from subtoken_train.errors import at_place, refuse
from subtoken_train.evaluation.tasks.task import Sample, Task
from subtoken_train.families.online import hub_asked, silence
from subtoken_train.typed import shown

CUT_OFF = "the file may be cut off: fetch it again"
MAX_TEXT = 2**32  # bytes of a benchmark's file at most
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_ORGANISATIONS = ("lmms-lab", "lmms-lab-encoder")  # renamed; releases of lmms-eval up to 0.7.2 use the first


class FileRow(NamedTuple):
    """Values by column, images ``EncodedImage`` or None, and the place: file and line or row, counted from 1."""

    values: Mapping[str, Any]
    place: str

    def text(self, column: str) -> str:
        """Return the text of a cell."""
        value = self.values[column]
        if not isinstance(value, str):
            raise ValueError(f"{self.place}: {column} is {value!r}, but must be a text; fetch the file again")
        return value

    def texts(self, column: str) -> list[str]:
        """Return the texts of a cell, which mappings may have as ``answer``."""
        found = self.values[column]
        if isinstance(found, list):
            given = [one.get("answer") if isinstance(one, Mapping) else one for one in found]
            if len(texts := [text for text in given if isinstance(text, str)]) == len(given):
                return texts
        raise ValueError(f"{self.place}: {column} is {found!r}, but must be a list of texts; fetch the file again")

    def image(self, column: str = "image") -> tuple[media.ImageSource]:
        """Return the row's image."""
        refuse((self.values[column] is None, f"{self.place}: the row has no image; fetch the file again"))
        return (self.values[column],)

    def with_values(self, **values: Any) -> "FileRow":
        """Return the row with some values more, or others."""
        return FileRow({**self.values, **values}, self.place)


def task_source(task: Task) -> Path | str:
    """Return where a task's files are, a folder or a Hub id."""
    source = task.source if task.source is not None else task.hub_id
    if source is None:
        raise ValueError(f"task {task.name} is on no hub: give source, the folder with its files. {task.where}")
    if Path(source).is_dir():
        return Path(source)
    if isinstance(source, str) and _HUB_ID.fullmatch(source) and not source.startswith("."):
        return source
    raise ValueError(f"task {task.name}: {source} is neither a folder nor a Hub id (owner/name). {task.where}")


def task_folder(task: Task) -> Path:
    """Return the folder of a task that is read from a folder alone."""
    source = task_source(task)
    if not isinstance(source, Path):
        raise ValueError(f"task {task.name} reads a folder, and {source} is not one. {task.where}")
    return source


def find_file(task: Task, folder: Path, *names: str) -> Path:
    """Find the first of ``names`` in ``folder``."""
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise ValueError(f"task {task.name}: {folder} has no {' or '.join(names)}. {task.where}")


def unique_ids(ids: Iterable[tuple[str, str]]) -> None:
    """Refuse an id that is there twice, by a ``ValueError`` that names both places."""
    seen: dict[str, str] = {}
    for name, place in ids:
        if name in seen:
            raise ValueError(f"{place}: id {name!r} appears twice, first in {seen[name]}; keep one")
        seen[name] = place


def check_columns(place: str, wanted: Iterable[str], present: Collection[str]) -> None:
    """Refuse a row or a file without some of the columns that are wanted."""
    if missing := [name for name in wanted if name not in present]:
        raise ValueError(f"{place}: no column {', '.join(missing)}; it has {', '.join(present)}")


def benchmark_text(path: Path) -> str:
    """Read a text file; one that is missing, not UTF-8, or holds a NUL is refused."""
    try:
        if (size := check_regular(path)) > MAX_TEXT:
            raise ValueError(f"{path} has {size:,} bytes; at most {MAX_TEXT:,} are read")
        text = path.read_text(encoding="utf-8")
    except OSError:
        raise ValueError(f"{path} is missing or cannot be read; check the path") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}, line {line}: not UTF-8 ({error.reason})") from None
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        raise ValueError(f"{path}, line {line}: holds a NUL character, so it is not text; {CUT_OFF}")
    return text


def read_entries(path: Path, key: str | None, columns: Sequence[str] = ()) -> list[FileRow]:
    """Read the objects that a JSON file lists or names, or lists under a key; each must have the columns."""
    content = _parsed(benchmark_text(path), str(path))
    if key is None and isinstance(content, dict):
        return [_object(values, f"{path}, {name!r}", columns) for name, values in content.items()]
    entries = content if key is None else content.get(key) if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise ValueError(f"{path} has no list {key or 'of objects'}; is it another file?")
    return [_object(values, f"{path}, {key or 'entry'}[{number}]", columns) for number, values in enumerate(entries)]


def read_jsonl(path: Path, columns: Sequence[str] = ()) -> list[FileRow]:
    """Read the objects of a JSON-lines file, whatever its suffix; each must have the columns. Empty lines go."""
    if (text := benchmark_text(path)).lstrip().startswith("["):
        raise ValueError(f"{path} is one JSON list, not one JSON object per line: write a line for each of them")
    lines = ((f"{path}, line {number}", line) for number, line in enumerate(text.split("\n"), 1) if line.strip())
    return [_object(_parsed(line, place), place, columns) for place, line in lines]


def _parsed(text: str, place: str) -> Any:
    with at_place("", f"; {CUT_OFF}"):
        return parse_json(text, place)


def _object(values: Any, place: str, columns: Sequence[str]) -> FileRow:
    if not isinstance(values, dict):
        raise ValueError(f"{place}: expected a JSON object, got {shown(values)}")
    check_columns(place, columns, list(values))
    for name in ("id", "question_id", "image_id", "imageId"):  # of a row or an image, in all benchmarks alike
        if not isinstance(values.get(name), str | int | None) or isinstance(values.get(name), bool):
            raise ValueError(f"{place}: {name} is {shown(values[name])}; it must be a text or a number; {CUT_OFF}")
    return FileRow(values, place)


def read_table(path: Path, columns: Sequence[str], delimiter: str = ",", header: bool = True) -> list[FileRow]:
    """Read a CSV or TSV file in UTF-8 as texts: ``columns`` and others; without ``header`` these alone, in order."""
    text = io.StringIO(benchmark_text(path).removeprefix("\ufeff"))
    reader, rows, line = csv.reader(text, delimiter=delimiter, strict=True), list[FileRow](), 1
    names = [] if header else list(columns)
    try:
        for cells in reader:
            place, line = f"{path}, line {line}", reader.line_num + 1
            if cells and not names:
                check_columns(str(path), columns, names := cells)
            elif cells and len(cells) != len(names):
                raise ValueError(f"{place}: {len(cells)} cells, but {len(names)} columns; {CUT_OFF}")
            elif cells:
                rows.append(FileRow(dict(zip(names, cells, strict=True)), place))
    except csv.Error as error:
        raise ValueError(f"{path}, line {line}: {error}; {CUT_OFF}") from None
    refuse((not names, f"{path} is empty; {CUT_OFF}"))
    return rows


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
    """Read all rows of a split of the task's Parquet set, images when asked for; ``datasets`` converts it once."""
    source = task_source(task)
    label = split if config is None else f"{config}, {split}"
    if isinstance(source, str):
        dataset = _from_hub(task, source, split, config)
        places = [f"{source} ({label}), row {row + 1}" for row in range(len(dataset))]
    else:
        if not (paths := parquet_files(source, split, config)):
            below = "data" if config is None else config
            raise ValueError(f"task {task.name}: {source} has no {below}/{split}-*.parquet. {task.where}")
        dataset, places = _from_files(paths)
    if missing := [name for name in (*columns, *images) if name not in dataset.column_names]:
        here = ", ".join(dataset.column_names)
        raise ValueError(f"{source} ({label}) has no column {', '.join(missing)}; its columns are {here}")
    content = {name: dataset.data.column(name).to_pylist() for name in columns}
    for name in images:
        absent = dataset.data.column(name).is_null().to_pylist()
        reads = [partial(_encoded_image, dataset, row, name) for row in range(len(places))]
        pairs = zip(absent, reads, places, strict=True)
        content[name] = [None if gone else media.EncodedImage(read, place) for gone, read, place in pairs]
    return [FileRow({name: content[name][row] for name in content}, place) for row, place in enumerate(places)]


def _encoded_image(dataset: Dataset, row: int, column: str) -> bytes:
    value = dataset[row][column]
    if isinstance(value, list):
        refuse((len(value) != 1, f"the row holds {len(value)} images, where one belongs; fetch the files again"))
        value = value[0]
    if isinstance(value, dict):
        value = value.get("bytes")
    refuse((value is None, "the row holds no bytes of an image; fetch the files again"))
    return bytes(value)


def _from_files(paths: list[Path]) -> tuple[Dataset, list[str]]:
    places = list[str]()
    for path in paths:
        check_regular(path)
        try:
            places += [f"{path}, row {row + 1}" for row in range(pq.read_metadata(path).num_rows)]
        except (ArrowInvalid, OSError) as error:
            raise ValueError(f"{path} is cut off or no Parquet file ({_reason(error)}); fetch it again") from None
    try:
        return _encoded(load_dataset("parquet", data_files=[str(path) for path in paths], split="train")), places
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


def check_complete(task: Task, samples: Sequence[Sample], limit: int | None) -> None:
    """Refuse a part of a set as if it were the set, unless a run asks for no more samples than its files hold."""
    refuse((not samples, f"task {task.name}: {task.source or task.hub_id} holds no sample. {task.where}"))
    found, expected = len(samples), task.expected_rows
    if expected is None or found == expected or (limit is not None and found >= limit):
        return
    words = f"task {task.name} has {found:,} of {expected:,} samples in {task.source or task.hub_id}"
    raise ValueError(f"{words}. Get the rest, or limit the run. {task.where}")


def check_samples(task: Task, samples: Sequence[Sample]) -> None:
    """Check every sample, of a task of one's own too."""
    unique_ids((sample.id, f"task {task.name}, sample {n:,}") for n, sample in enumerate(samples, 1))
    for sample in samples:
        place = f"task {task.name}, sample {sample.id!r}"
        written = sample.prompt.count("<image>") if task.modality == "image" else len(sample.images)
        images, most, context = len(sample.images), len(sample.prompt), sample.context_characters or 0
        refuse(
            (written != images, f"{place}: {written} <image> in the prompt, {images} images; write one for each"),
            (not 0 <= context <= most, f"{place}: context_characters {context} must be 0 to {most}"),
        )
    named = dict[str, None]()
    for image in (image for sample in samples for image in sample.images):  # a video's frames, or their folder
        frames = image.frames if isinstance(image, media.VideoSource) else image
        paths = frames if isinstance(frames, tuple) else (frames,) if isinstance(frames, Path) else ()
        named |= dict.fromkeys(map(str, paths))
    missing = [name for folder in media.compare_images(named, Path(), outside=True) for name in folder.missing]
    if missing:
        words = f"{len(missing):,} of {len(named):,} images are missing (first: {missing[0]})"
        raise ValueError(f"task {task.name}: {words}. {task.where}")


def open_some(samples: Sequence[Sample]) -> list[tuple[int, int]]:
    """Open five images, spread over the samples; their widths and heights in pixels."""
    seen = [sample for sample in samples if sample.images]
    return [media.open_image(media.first_frame(each.images[0])).size for each in seen[:: max(1, len(seen) // 5)][:5]]
