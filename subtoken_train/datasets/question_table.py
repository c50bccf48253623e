"""A table of questions and answers, however its columns are called, or a file of conversations, as records."""

import csv
import io
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from subtoken_train.datasets.conversations import CONVERSATION_LISTS, checked_record, llava_form
from subtoken_train.datasets.image_sources import PICTURE_SUFFIXES
from subtoken_train.datasets.record_format import IMAGE_PLACEHOLDER, column_problem, has_media
from subtoken_train.datasets.row_files import file_kind, files_of_set, opened, placed_rows
from subtoken_train.documents import check_regular, decoded, text_problem
from subtoken_train.errors import clipped, refuse
from subtoken_train.families.literal_marks import picture_marks
from subtoken_train.typed import shown

MAX_BYTES = 2**28
_NAMES = {
    "image": (
        "image", "image_path", "image_file", "image_name", "img", "filename", "file_name", "file", "path", "picture",
    ),
    "question": ("question", "prompt", "instruction", "query"),
    "answer": ("answer", "response", "output", "label", "completion", "target", "caption"),
}  # fmt: skip
"""Usual names of the columns, those before which go first."""
_CAPTIONS = (*_NAMES["answer"], "captions", "description", "text")
DESCRIBE = "Describe the picture."  # asked where a table has pictures and what is said of them, and no questions
_FURTHER = ("input", "context")  # columns that stand below a question as a part of it (Alpaca's records, Dolly's)
_BESIDE = ("id", "kind", "system")
_LISTED = 160  # characters of columns in a message
Placed = tuple[str, dict[str, Any]]  # where a row or record stands (file and line or record), for messages, and it


class OwnTable(NamedTuple):
    """Content of a table: records, or documents of plain text."""

    records: list[Placed]  # conversations in LLaVA's form; empty where there are texts
    texts: Sequence[str] = ()
    columns: str = ""  # what was read as what, in words; empty where the records came as conversations
    asked: str = ""  # the fixed question of captions
    unread: tuple[str, ...] = ()  # the other columns


def read_own_table(path: Path, chosen: Mapping[str, str | None], asked: str | None = None) -> OwnTable:
    """Read a table whole; ``chosen``: columns that the user named; ``asked``: of every picture, as the user said."""
    if sum(map(check_regular, files_of_set(path))) > MAX_BYTES:
        raise ValueError(f"{path} has more than {MAX_BYTES:,} bytes; a recipe reads records and texts itself (data)")
    rows = list(_delimited(path) if file_kind(path) in (".csv", ".tsv") else placed_rows(path))
    refuse((not rows, f"{path} holds no record; at least one is needed"))
    if odd := next(((place, row) for place, row in rows if not isinstance(row, dict)), None):
        raise ValueError(f"{odd[0]} is {shown(odd[1])}; an object with names is needed")
    if any(isinstance(row.get(name), list) for _, row in rows for name in CONVERSATION_LISTS):
        refuse((asked is not None, f"{path} holds conversations, which have their questions; leave --question out"))
        if named := [kind for kind, name in chosen.items() if name is not None]:
            raise ValueError(f"{path} holds conversations, which have no columns; leave --{named[0]}-column out")
        pictured = any(_has_pictures(row) for _, row in rows)
        return OwnTable([(place, checked_record(row, place, as_document=not pictured)) for place, row in rows])
    names = list(dict.fromkeys(name for _, row in rows for name in row))
    text, question, answer = (_found(usual, names) for usual in (("text",), _NAMES["question"], _NAMES["answer"]))
    if asked := _fixed_question(path, rows, names, chosen, asked):
        answer, text = chosen["answer"] or _found(_CAPTIONS, names), None
        chosen = {**chosen, "answer": answer}
    if text and question is None and all(name is None for name in chosen.values()):
        for kind in ("image", "answer"):
            if (other := _found(_NAMES[kind], names)) is not None:
                raise ValueError(f"{path} has columns {text!r} and {_named(other)} ({kind}): name them, or remove one")
        return OwnTable([], [_cell(row, text, place) for place, row in rows], text, unread=_unread(rows, names, {text}))
    columns = {k: None if k == "question" and asked else _column(path, k, chosen[k], names) for k in _NAMES}
    further = [name for usual in _FURTHER if (name := _found((usual,), names)) and name not in columns.values()]
    columns |= {key: _found((key,), names) for key in _BESIDE}
    unread = _unread(rows, names, {*columns.values(), *further})
    records = [(place, _record(row, columns, further, place, n, asked or "")) for n, (place, row) in enumerate(rows)]
    read = [f"{kind} in {columns[kind]!r}" for kind in _NAMES if columns[kind]]
    read += [f"with each question in {name!r}" for name in further]
    read += [f"before each question in {columns['system']!r}"] if columns["system"] else []
    return OwnTable(records, (), ", ".join(read), asked or "", unread)


def _fixed_question(
    path: Path, rows: list[Placed], names: list[str], chosen: Mapping[str, str | None], asked: str | None
) -> str:
    """Return the question of captions: the user's, or the usual one where pictures are named and nothing is asked."""
    image = chosen["image"] or _found(_NAMES["image"], names)
    answer, question = (chosen[kind] or _found(_NAMES[kind], names) for kind in ("answer", "question"))
    captions = image is None and question is None and (asked is not None or _found(("caption", "captions"), names))
    add = shlex.join(["subtoken-train", "init", str(path.parent), "--image-column", "COLUMN"])
    refuse(
        (asked is not None and not asked.strip(), f"--question is empty; leave it out to ask {DESCRIBE!r}"),
        (asked is not None and chosen["question"] is not None, "give --question (one for all) or --question-column"),
        (captions, f"{path} has captions and no column of their files ({_NAMES['image'][0]}, file); name it: {add}"),
    )
    if asked is not None or question is not None or image is None:
        return (asked or "").strip()
    pictured = any(str(row.get(image)).lower().endswith(PICTURE_SUFFIXES) for _, row in rows)
    return DESCRIBE if answer or (pictured and _found(_CAPTIONS, names)) else ""


def _named(column: str) -> str:
    return clipped(repr(column), 60)


def _has_pictures(row: dict[str, Any]) -> bool:
    try:
        return has_media(llava_form(row))
    except ValueError:  # said when it is checked
        return False


def _unread(rows: list[Placed], names: Sequence[str], read: set[str | None]) -> tuple[str, ...]:
    others = tuple(name for name in names if name not in read)
    for place, row in rows:
        for name in others:
            if row.get(name) not in (None, "", [], {}, "[]") and (problem := column_problem(name, row[name])):
                raise ValueError(f"{place} has {_named(name)}, {shown(row[name])}: {problem}")
    return others


def _delimited(path: Path) -> Iterator[Placed]:
    """Yield the lines of a CSV file; commas, semicolons or tabs, whichever its first line has most of."""
    with opened(path) as file:
        text = decoded(file.read(), str(path)).removeprefix("\ufeff")
    delimiter = "\t" if file_kind(path) == ".tsv" else max(",;\t", key=text.partition("\n")[0].count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    header: list[str] = []
    try:
        for cells in reader:
            place = f"{path}, line {reader.line_num}"
            if not any(cell.strip() for cell in cells):
                continue
            if not header:
                header = [cell.strip() for cell in cells]
                if twice := [name for name in header if header.count(name) > 1]:
                    raise ValueError(f"{path}: column {_named(twice[0])} appears twice; rename one")
                continue
            if len(cells) != len(header):
                raise ValueError(f"{place} has {len(cells)} cells, and the first line {len(header)}; quote texts")
            yield place, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: invalid CSV ({error})") from None


def _found(usual: Sequence[str], names: Sequence[str]) -> str | None:
    there = {name.strip().lower().replace(" ", "_").replace("-", "_"): name for name in names}
    return next((there[name] for name in usual if name in there), None)


def _column(path: Path, kind: str, chosen: str | None, names: list[str]) -> str | None:
    found = _found(_NAMES[kind], names) if chosen is None else chosen
    if found in names or (found is None and kind == "image"):
        return found
    listed = clipped(", ".join(names), _LISTED)
    if chosen is not None:
        raise ValueError(f"{path} has no column {_named(chosen)}; its columns are {listed}")
    usual = f"has no column for the {kind} ({', '.join(_NAMES[kind])})"
    raise ValueError(f"{path} {usual}; its columns are {listed}: name it with --{kind}-column")


def _record(
    row: dict[str, Any], columns: Mapping[str, str | None], further: list[str], place: str, number: int, asked: str
) -> dict[str, Any]:
    cell = {kind: "" if (name := columns[kind]) is None else _cell(row, name, place) for kind in _NAMES}
    below = [_cell(row, name, place, empty=True) for name in further]
    question = "\n".join(filter(None, [asked or cell["question"], *below]))
    own_id, kind = (None if (name := columns[key]) is None else row.get(name) for key in ("id", "kind"))
    made: dict[str, Any] = {"id": str(number if own_id is None else own_id)}
    if columns["image"] is not None:
        if IMAGE_PLACEHOLDER in picture_marks(question + cell["answer"]):
            raise ValueError(f"{place}: a text holds {IMAGE_PLACEHOLDER}; as text, write \\{IMAGE_PLACEHOLDER}")
        made["image"] = cell["image"]
        question = f"{IMAGE_PLACEHOLDER}\n{question}"
    if isinstance(kind, str) and kind.strip():
        made["kind"] = kind.strip()
    if (system := columns["system"]) is not None:
        made["system"] = _cell(row, system, place, empty=True)
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": cell["answer"]}]
    return checked_record({**made, "conversations": turns}, place, as_document=columns["image"] is None)


def _cell(row: dict[str, Any], column: str, place: str, empty: bool = False) -> str:
    """Return a text of one cell, which may be ``empty``; numbers are written out, and a list of one is that one."""
    value = row.get(column)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        value = shown(value)
    value = "" if value is None else value
    if not isinstance(value, str):
        problem = f"is {shown(value)}, which is not text; fill it or drop the line"
    elif (found := text_problem(value)) and not (empty and not value.strip()):
        problem = f"{found}; fill it, or drop the line"
    else:
        return value.strip()
    raise ValueError(f"{place}: column {_named(column)} {problem}")
