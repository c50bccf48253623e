"""One's own data: what a folder holds becomes records or texts in three splits, by picture, question or document."""

import hashlib
import os
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from subtoken_train.datasets import record_format as form
from subtoken_train.datasets.image_sources import PICTURE_SUFFIXES, inside, open_image
from subtoken_train.datasets.known_files import fetch_command
from subtoken_train.datasets.question_table import OwnTable, Placed, read_own_table
from subtoken_train.datasets.row_files import COLUMNAR, file_kind, first_of_set
from subtoken_train.datasets.unknown_tokens import spread
from subtoken_train.documents import check_regular, read_text, text_problem
from subtoken_train.errors import clipped, refuse
from subtoken_train.types import grouped

TABLES = (".csv", ".tsv", ".json", ".jsonl", *COLUMNAR)
TEXTS = (".txt", ".md")
ENOUGH = 30  # documents; fewer are cut
SHARE, MOST_HELD = 0.1, 1000  # of pictures, questions or texts for dev and test each, and the most of them
SPLITS = ("train", "dev", "test")
_ABOUT_IT = ("readme", "license", "licence", "notice", "copying", "changelog", "dataset_info", "dataset_infos")
"""Files about a data set, which are none of it: texts and tables beside it, not in the folders below."""
_OF_ARROW = ("state.json", "dataset_info.json", "dataset_dict.json")  # beside the files of ``save_to_disk``
_BLANK_LINES = re.compile(r"\n(?:[ \t]*\n)+")
_LISTED = 3  # names in a message
T = TypeVar("T")


@dataclass(frozen=True)
class OwnData:
    """Records of three splits, in LLaVA's form or ``{"text": ...}``, and what was read, a line each."""

    kind: str
    splits: dict[str, list[dict[str, Any]]]
    found: tuple[str, ...]


def read_own(
    folder: Path,
    table: str | None,
    columns: dict[str, str | None],
    seed: int,
    show: Callable[[int, int], None] = lambda done, total: None,
    question: str | None = None,
) -> OwnData:
    """Read a folder of images and a table (None: the one there), a file of conversations, or plain texts."""
    own = look_into(folder)
    if (name := _table(own, table)) is None:
        none, named = f"but {folder} holds no table", [kind for kind, column in columns.items() if column is not None]
        refuse((question is not None, f"--question is asked of pictures with captions, {none}; leave it out"))
        refuse((named, f"--{next(iter(named), '')}-column names a column, {none}"))
        data = _text_data(read_texts(own), seed, folder, f"{len(own.texts):,} text files")
    else:
        try:
            read = read_own_table(folder / name, columns, question)
        except ValueError as error:
            again = "" if "subtoken-train init" in str(error) else f"; then: {_init(folder)}"
            raise ValueError(f"{error}{again}") from None
        data = _table_data(own, name, read, seed, show)
    about = f"{_files(len(own.left_out))} about the data left out ({', '.join(own.left_out)})" if own.left_out else ""
    return replace(data, found=tuple(filter(None, (*data.found, about, own.unread))))


@dataclass(frozen=True)
class OwnFolder:
    """A folder's files, as relative paths; ``tables``: of a set its first; ``left_out``: about the data."""

    path: Path
    images: tuple[str, ...]
    tables: tuple[str, ...]
    texts: tuple[str, ...]
    left_out: tuple[str, ...]
    unread: str = ""


def look_into(folder: Path) -> OwnFolder:
    """List a folder; hidden files, and texts and tables that tell about the data (README, LICENSE), are left out."""
    command = fetch_command(folder)
    instead = f"get it: {command}" if command else "name the folder of your data"
    refuse(
        (not folder.exists(), f"{folder} does not exist; {instead}"),
        (not folder.is_dir(), f"{folder} is not a folder; name the folder that holds it, and the file with --table"),
    )
    found: dict[str, list[str]] = defaultdict(list)
    for place, folders, names in os.walk(folder, onerror=_unlisted):
        folders[:] = [name for name in folders if not name.startswith((".", "__"))]
        for name in (name for name in names if not name.startswith(".")):
            path = Path(os.path.relpath(place, folder), name).as_posix()
            found[_group(path)].append(path)
    images, tables, texts, about = (tuple(sorted(found.pop(kind, ()))) for kind in ("images", "tables", "texts", ""))
    kinds = Counter({kind: len(names) for kind, names in found.items()})
    listed = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common(_LISTED))
    others = f" and {len(kinds) - _LISTED:,} kinds more" if len(kinds) > _LISTED else ""
    unread = f"{_files(kinds.total())} of kinds that are not read: {listed}{others}" if kinds else ""
    if not (images or tables or texts):
        beside = f" (but {', '.join(about)}, about the data)" if about else f"; {unread}" if unread else ""
        none = f"no images, and no file that ends with one of {', '.join((*TABLES, *TEXTS))}{beside}"
        raise ValueError(f"{folder} holds no data: {none}; add texts, or pictures and a table, then: {_init(folder)}")
    return OwnFolder(folder, images, tuple(dict.fromkeys(map(first_of_set, tables))), texts, about, unread)


def _unlisted(error: OSError) -> None:
    raise error


def _group(name: str) -> str:
    """Return what a file is: images, tables, texts, "" (about the data), or its suffix, which is not read."""
    kind, suffix = file_kind(name), os.path.splitext(name)[1].lower()
    if os.path.splitext(name)[0].lower() in _ABOUT_IT and suffix in (*TABLES, *TEXTS):  # not in the folders below
        return ""
    if kind in TABLES:
        return "" if os.path.basename(name) in _OF_ARROW else "tables"
    groups = dict.fromkeys(PICTURE_SUFFIXES, "images") | dict.fromkeys(TEXTS, "texts")
    return groups.get(suffix, suffix or "without a suffix")


def _files(count: int) -> str:
    return f"{count:,} file{'s' if count > 1 else ''}"


def _init(folder: Path, *options: str) -> str:
    return shlex.join(["subtoken-train", "init", str(folder), *options])


def _table(own: OwnFolder, chosen: str | None) -> str | None:
    folder, listed = own.path, ", ".join(own.tables[:_LISTED])
    listed += f" and {len(own.tables) - _LISTED:,} more" if len(own.tables) > _LISTED else ""
    if chosen is not None:
        there = f"its tables are {listed}" if own.tables else "it holds no table"
        missing = chosen not in own.tables and not (folder / chosen).is_file()
        refuse((missing, f"{folder} has no table {chosen!r}; {there}"))
        return chosen
    best = next((name for name in own.tables if "train" in name), next(iter(own.tables), ""))
    texts, choice = f"texts ({next(iter(own.texts), '')})", _init(folder, "--table", best)
    held, other = f"{folder} holds {len(own.images):,} images and no table of questions and answers", ";"
    columns = "image, question, answer (or file, caption), then"
    if own.texts:
        other = f", but {texts}: move one kind away, or"
    refuse(
        (len(own.tables) > 1, f"{folder} holds several tables ({listed}); say which one with --table: {choice}"),
        (own.tables and own.texts, f"{folder} holds a table ({best}) and {texts}; move the texts away, or: {choice}"),
        (own.images and not own.tables, f"{held}{other} add a CSV file with the columns {columns}: {_init(folder)}"),
    )
    return best or None


def read_texts(own: OwnFolder) -> list[str]:
    """Read the text files of a folder."""
    texts = [read_text(own.path / name).removeprefix("\ufeff") for name in own.texts]
    for name, text in zip(own.texts, texts, strict=True):
        if text.strip() and (problem := text_problem(text)):
            raise ValueError(f"{own.path / name} {problem}; fix it, or move it away")
    refuse((not any(map(str.strip, texts)), f"the texts of {own.path} are empty; add some, then: {_init(own.path)}"))
    return texts


def _text_data(texts: Sequence[str], seed: int, folder: Path, what: str, unread: str = "") -> OwnData:
    """Make documents: the texts themselves where they are many, else runs of paragraphs of about equal length."""
    documents = [text.replace("\r\n", "\n").strip() for text in texts if text.strip()]
    if len(documents) < ENOUGH:
        length = max(1, sum(map(len, documents)) // ENOUGH)
        documents = [piece for text in documents for piece in _pieces(text, length)]
    groups = {text: [{"text": text}] * count for text, count in Counter(documents).items()}
    cut = "" if len(documents) == len(texts) else f", {len(documents):,} documents"
    found = (f"{what} ({sum(map(len, texts)):,} characters){cut}", unread)
    return OwnData("texts", _split(groups, seed, "documents", folder), tuple(filter(None, found)))


def _pieces(text: str, length: int) -> Iterator[str]:
    """Cut whole paragraphs, each piece of ``length`` characters or more but the last; lines of a single paragraph."""
    parts = _BLANK_LINES.split(text)
    parts, joint = (parts, "\n\n") if len(parts) > 1 else (text.split("\n"), "\n")
    piece, gathered = list[str](), 0
    for part in parts:
        piece.append(part)
        gathered += len(part)
        if gathered >= length:
            yield joint.join(piece)
            piece, gathered = [], 0
    if piece:
        yield joint.join(piece)


def _table_data(own: OwnFolder, name: str, read: OwnTable, seed: int, show: Callable[[int, int], None]) -> OwnData:
    holds = f"{own.path} holds {len(own.images):,} images, and {name}"
    refuse((read.texts and own.images, f"{holds} texts alone; give --question-column and --answer-column"))
    unread = f"columns not read: {clipped(', '.join(read.unread), 160)}" if read.unread else ""
    if read.texts:
        return _text_data(read.texts, seed, own.path, f"{name}: {len(read.texts):,} texts", unread)
    records = _placed(own, name, read.records)
    names = list(dict.fromkeys(each for _, row in records for each in form.image_names(row)))
    refuse((own.images and not names, f"{holds} names none of them; say which column does with --image-column"))
    found = [f"{name}: {len(records):,} records ({read.columns or 'conversations'})", unread]
    if read.asked:
        found.insert(1, f"asked of every picture: {read.asked!r}; another question: --question TEXT")
    same = _same_pictures(own.path, names)
    if names:
        opened = spread(len(names))
        for done, place in enumerate(opened, 1):
            open_image(own.path / names[place])
            show(done, len(opened))
        copies, unused = len(names) - len(set(same.values())), len(own.images) - len(names)
        found.append(
            f"{len(names):,} images, {'all' if len(opened) == len(names) else f'{len(opened):,} of them'} opened"
            + (f"; {copies:,} are copies of others" if copies else "")
            + (f"; {unused:,} more are in the folder and in no record" if unused else "")
        )
    split = _split(_groups(records, same), seed, "pictures" if names else "questions", own.path)
    rows = {part: [row for _, row in chosen] for part, chosen in split.items()}
    return OwnData("images" if names else "conversations", rows, tuple(filter(None, found)))


def _placed(own: OwnFolder, table: str, records: Sequence[Placed]) -> list[Placed]:
    paths, made, missing, total = _PicturePaths(own, table), [], list[tuple[str, str]](), 0
    for place, row in records:
        refuse((form.video_names(row), f"{place} has a video; name the file in a recipe itself (data.train_file)"))
        form.refuse_files(form.files_named(row), place, own.path)
        found = [paths.path(name, place) for name in form.image_names(row)]
        missing += [(name, place) for name in found if name not in paths.there]
        total += len(found)
        made.append((place, {**row, "image": found[0] if len(found) == 1 else found} if found else row))
    if missing:
        name, place = missing[0]
        first = f"(first: {name[:80]!r}, {place}); add them, or drop their lines, then: {_init(own.path)}"
        raise ValueError(f"{len(missing):,} of {total:,} images are not in {own.path} {first}")
    return made


class _PicturePaths:
    """Finds images by what a table calls them: a path from the folder or from it, or the one of this name or stem."""

    def __init__(self, own: OwnFolder, table: str) -> None:
        self._folder, self._beside, self.there = own.path, PurePosixPath(table).parent, set(own.images)
        paths = map(PurePosixPath, own.images)
        self._by_name = grouped((called, str(path)) for path in paths for called in {path.name, path.stem})

    def path(self, name: str, place: str) -> str:
        """Return an image's path from the folder; one that is not found keeps its name."""
        if os.path.isabs(name):
            name = os.path.relpath(name, os.path.abspath(self._folder))
        for start in (PurePosixPath(), self._beside):
            if (path := os.path.normpath(start / name)) in self.there:
                return self._within(path, place)
        self._within(os.path.normpath(self._beside / name), place)
        # a name's folders are the last ones of a path, or the reverse: ``train/`` is not ``val/``
        given = PurePosixPath(os.path.normpath(name)).parts[-2::-1]
        same = self._by_name.get(PurePosixPath(name).name, [])
        called = [each for each in same if all(map(str.__eq__, given, PurePosixPath(each).parts[-2::-1]))]
        if len(called) > 1:
            raise ValueError(f"{place}: image {name[:80]!r} could be {called[0]} or {called[1]}; write its path")
        return self._within(called[0], place) if called else name

    def _within(self, name: str, place: str) -> str:
        try:
            inside(self._folder, name)
        except ValueError:
            raise ValueError(f"{place}: image {name[:80]!r} lies outside of {self._folder}; copy it in") from None
        return name


def _same_pictures(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Map each image to the first that has the very same bytes; only files of equal sizes are read."""
    first = {name: name for name in names}
    for alike in grouped(((folder / name).stat().st_size, name) for name in sorted(names)).values():
        seen: dict[bytes, str] = {}
        for name in alike if len(alike) > 1 else ():
            check_regular(folder / name)
            with (folder / name).open("rb") as file:
                first[name] = seen.setdefault(hashlib.file_digest(file, "sha256").digest(), name)
    return first


def _split(groups: Mapping[str, Sequence[T]], seed: int, what: str, folder: Path) -> dict[str, list[T]]:
    """Share whole groups out to splits, in their own order; a group's split depends on its name and the seed alone."""
    if len(groups) < len(SPLITS):
        raise ValueError(f"too few different {what} ({len(groups)}), three at least; add some, then: {_init(folder)}")
    held = min(max(1, round(SHARE * len(groups))), MOST_HELD)
    drawn = sorted(groups, key=lambda name: hashlib.sha256(f"{seed}\0{name}".encode()).digest())
    parts = {"dev": {*drawn[:held]}, "test": {*drawn[held : 2 * held]}, "train": {*drawn[2 * held :]}}
    return {split: [each for name in groups if name in parts[split] for each in groups[name]] for split in SPLITS}


def _groups(records: Sequence[Placed], same: Mapping[str, str]) -> dict[str, list[Placed]]:
    """Group records that share a picture, directly or through others; those without one by what they ask."""
    roots: dict[str, str] = {}

    def root(name: str) -> str:
        while roots.setdefault(name, name) != name:
            roots[name] = name = roots[roots[name]]
        return name

    keys = []
    for _, row in records:
        names = [f"image {same[name]}" for name in form.image_names(row)] or [f"asks {_asked(row)}"]
        for name in names[1:]:
            roots[root(name)] = root(names[0])
        keys.append(names[0])
    return grouped((root(key), record) for record, key in zip(records, keys, strict=True))


def _asked(row: dict[str, Any]) -> str:
    said = form.said_turns(row)
    first = next((place for place, turn in enumerate(said) if turn["from"] == "human"), -1)
    return " ".join(word for turn in said[: first + 1] for word in turn["value"].split())
