"""What a folder of one's own data is, and its records in three splits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from subtoken_train.datasets.own.data_split import check_answers, group_records, split_by
from subtoken_train.datasets.own.folder_scan import OwnFolder, look_into
from subtoken_train.datasets.own.picture_names import PictureNames, check_pictures, same_pictures
from subtoken_train.datasets.own.question_table import OwnRecord, OwnTable, read_own_table, unread_words
from subtoken_train.datasets.own.text_pieces import documents_of, read_texts
from subtoken_train.datasets.record_format import image_names, video_names

_LISTED = 3  # names in a message


@dataclass(frozen=True)
class OwnData:
    """Records of three splits.

    Attributes:
        kind: ``images`` (conversations about images), ``conversations`` (without any) or ``texts``.
        splits: rows by split, in LLaVA's form, or ``{"text": ...}``.
        found: what was read, a line each.
    """

    kind: str
    splits: dict[str, list[dict[str, Any]]]
    found: tuple[str, ...]


def read_own(
    folder: Path,
    table: str | None,
    columns: dict[str, str | None],
    seed: int,
    show: Callable[[int, int], None] = lambda done, total: None,
) -> OwnData:
    """Look at a folder and read what it holds.

    Args:
        folder: images and a table of questions and answers, a file of conversations, or plain texts.
        table: the file to read, below the folder; None: the one that is there.
        columns: see ``read_own_table``.
        seed: of the split.
        show: told (done, total) while images are opened.

    Raises:
        ValueError: the folder is empty or mixed, or what it holds is broken, missing or too much.
        OSError: something cannot be read.
    """
    own = look_into(folder)
    data = _read(own, _table(own, table), columns, seed, show)
    if not (names := own.left_out):
        return data
    left_out = f"{len(names):,} file{'s' if len(names) > 1 else ''} about the data left out ({', '.join(names)})"
    return replace(data, found=(*data.found, left_out))


def _read(
    own: OwnFolder, name: str | None, columns: dict[str, str | None], seed: int, show: Callable[[int, int], None]
) -> OwnData:
    """What the table holds, or the texts where it is None."""
    if name is None:
        if named := [kind for kind, column in columns.items() if column is not None]:
            raise ValueError(f"--{named[0]}-column names a column, but {own.path} holds no table")
        return _text_data(own, read_texts(own), seed, f"{len(own.texts):,} text files")
    read = read_own_table(own.path / name, columns)
    if read.texts and own.images:
        raise ValueError(
            f"{own.path} holds {len(own.images):,} images, and {name} texts alone; name its columns with "
            "--image-column, --question-column and --answer-column, or move the images away"
        )
    if read.texts:
        return _text_data(own, read.texts, seed, f"{name}: {len(read.texts):,} texts", unread_words(read))
    return _record_data(own, name, read, seed, show)


def _table(own: OwnFolder, chosen: str | None) -> str | None:
    """The table that is meant; None where the folder is one of texts."""
    if chosen is not None:
        if chosen not in own.tables and not (own.path / chosen).is_file():
            there = f"its tables are {', '.join(own.tables[:_LISTED])}" if own.tables else "it holds no table"
            raise ValueError(f"{own.path} has no table {chosen!r}; {there}")
        return chosen
    if len(own.tables) > 1:
        more = f" and {len(own.tables) - _LISTED:,} more" if len(own.tables) > _LISTED else ""
        listed = ", ".join(own.tables[:_LISTED])
        raise ValueError(f"{own.path} holds several tables ({listed}{more}); say which one with --table")
    if own.tables and own.texts:
        raise ValueError(
            f"{own.path} holds a table ({own.tables[0]}) and texts ({own.texts[0]}); say --table {own.tables[0]}, or "
            "move the texts to a folder of their own"
        )
    if own.images and not own.tables:
        other = f", but texts ({own.texts[0]}): move one kind away, or" if own.texts else ";"
        raise ValueError(
            f"{own.path} holds {len(own.images):,} images and no table of questions and answers{other} add a CSV file "
            "with the columns image, question, answer"
        )
    return own.tables[0] if own.tables else None


def _text_data(own: OwnFolder, texts: list[str], seed: int, what: str, unread: str = "") -> OwnData:
    documents = documents_of(texts)
    groups: dict[str, list[dict[str, Any]]] = {}
    for document in documents:
        groups.setdefault(document, []).append({"text": document})
    cut = "" if len(documents) == len(texts) else f", {len(documents):,} documents"
    found = (f"{what} ({sum(map(len, texts)):,} characters){cut}", unread)
    return OwnData("texts", split_by(groups, seed, "documents"), tuple(filter(None, found)))


def _record_data(own: OwnFolder, name: str, read: OwnTable, seed: int, show: Callable[[int, int], None]) -> OwnData:
    records = _placed(own, name, read)
    names = list(dict.fromkeys(each for record in records for each in image_names(record.row)))
    found = [f"{name}: {len(records):,} records ({read.columns or 'conversations'})"]
    if unread := unread_words(read):
        found.append(unread)
    same: dict[str, str] = {}
    if names:
        opened = check_pictures(own.path, names, show)
        same = same_pictures(own.path, names)
        copies = len(names) - len(set(same.values()))
        unused = len(own.images) - len(names)
        found.append(
            f"{len(names):,} images, {'all' if opened == len(names) else f'{opened:,} of them'} opened"
            + (f"; {copies:,} are copies of others" if copies else "")
            + (f"; {unused:,} more are in the folder and in no record" if unused else "")
        )
    elif own.images:
        raise ValueError(
            f"{own.path} holds {len(own.images):,} images, and {name} names none of them; say which column does with "
            "--image-column, or move the images away"
        )
    # chats without an image may well begin alike and go on otherwise
    check_answers([record for record in records if read.columns or image_names(record.row)], same)
    split = split_by(group_records(records, same), seed, "pictures" if names else "questions")
    rows = {part: [record.row for record in chosen] for part, chosen in split.items()}
    return OwnData("images" if names else "conversations", rows, tuple(found))


def _placed(own: OwnFolder, table: str, read: OwnTable) -> list[OwnRecord]:
    """The records with images that are there."""
    finder = PictureNames(own, table)
    for record in read.records:
        if video_names(record.row):
            raise ValueError(f"{record.place} has a video; name the file in a recipe itself (data.train_file)")
    records = [finder.placed(record) for record in read.records]
    if missing := finder.missing(records):
        name, place = missing[0]
        total = sum(len(image_names(record.row)) for record in records)
        raise ValueError(
            f"{len(missing):,} of {total:,} images are not in {own.path} (first: {name[:80]!r}, {place}); add them, or "
            "drop their lines"
        )
    return records
