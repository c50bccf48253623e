"""Folders of one's own data for ``init``: tables, names of images and whole folders with something wrong in them."""

from __future__ import annotations

import csv
import io
import json
import random

from tests.hostile.case import Answer, Case, Expect, Place, Reference
from tests.hostile.data_files import OUTSIDE, marked
from tests.hostile.known import Format, NoDocument, change, damage
from tests.hostile.references import both, same
from tests.hostile.values import NAMES, no_file, shown, written

HEADERS = ("image,question,answer", "file;prompt;label", "a,b,c", "image,question", "image,question,image", "", ",,")
MADE = "mine_subtoken"
PLAIN = tuple(name for name in NAMES if name.strip() and name.isprintable())
NO_TEXTS = ("", " ", "\x00", "\u200b", "\ufeff")
FORM = Format(
    legal={
        "*.messages.*.role": lambda value: value in ("user", "assistant", "system"),
        "*.messages.*.content": lambda value: isinstance(value, str | list),
        "*.messages.*.content.*": lambda value: isinstance(value, str | dict),
        "*.messages.*.content.*.text": lambda value: isinstance(value, str),
        "*.images.*": lambda value: isinstance(value, str | dict),
        "*.images": lambda value: isinstance(value, str | list | dict),
    },
    unsaid=("*.*", "*.messages.*.*", "*.messages.*.content.*.*", "*.messages.*.content.*", "*.messages.*", "*"),
)
OF_TABLE = Format()
Table = tuple[bytes, bytes, str, Expect]
"""A table, the one that it means where it is right, what was done, and what must come of it."""


def cell(text: str) -> str:
    """A cell of a CSV file."""
    return '"' + text.replace('"', '""') + '"'


def rows_text(header: str, rows: list[list[str]]) -> bytes:
    """A table in CSV."""
    lines = [header, *(",".join(map(cell, row)) for row in rows)]
    return ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass")


def csv_table(draw: random.Random, names: list[str]) -> Table:
    """A table whose columns, cells or bytes are odd."""
    rows = [[name, f"list {i} .", "none"] for i, name in enumerate(names)]
    kind = draw.choice(("header", "cell", "no text", "outside", "two answers", "bytes", "bytes", "whole"))
    header, expect, what = HEADERS[0], Expect.REFUSED, kind
    whole = rows_text(header, rows)
    if kind == "header":
        header = draw.choice(HEADERS[2:])
        what = f"header {header!r}"
    elif kind == "cell":
        value = draw.choice(PLAIN)
        rows[draw.randrange(len(rows))][draw.choice((1, 2))] = value
        expect, what = Expect.TAKEN, f"a cell is {shown(value)}"
        whole = rows_text(header, rows)
    elif kind == "no text":
        value = draw.choice(NO_TEXTS)
        rows[draw.randrange(len(rows))][draw.choice((1, 2))] = value
        what = f"a cell is {shown(value)}"
    elif kind == "outside":
        value = draw.choice(OUTSIDE)
        rows[0][0] = value
        what = f"an image is {shown(value)}"
    elif kind == "two answers":
        rows.append([names[0], "list 0 .", "7"])
    elif kind == "whole":
        expect = Expect.TAKEN
    content = rows_text(header, rows)
    if kind == "bytes":
        content, what, expect = damage(draw, content, parsed_csv, OF_TABLE)
    return content, whole, what, expect


def parsed_csv(content: bytes) -> list[list[str]]:
    """The cells of a table in UTF-8, with or without a byte-order mark."""
    try:
        text = content.decode("utf-8-sig")
        if "\0" in text:
            raise NoDocument("a NUL")
        return [row for row in csv.reader(io.StringIO(text, newline=""), strict=True) if row]
    except (ValueError, csv.Error) as error:
        raise NoDocument(str(error)) from None


def json_table(draw: random.Random, names: list[str]) -> Table:
    """Conversations in one of their forms, with one thing wrong."""
    rows = [
        {
            "images": [name],
            "messages": [
                {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": f"list {i} ."}]},
                {"role": "assistant", "content": "none"},
            ],
        }
        for i, name in enumerate(names)
    ]
    whole = written(rows).encode()
    if draw.random() < 0.2:
        return whole, whole, "whole messages", Expect.TAKEN
    if draw.random() < 0.2:
        content, what, expect = damage(draw, whole, marked, FORM)
        return content, whole, f"messages: {what}", expect
    spoilt, what, expect = change(draw, rows, FORM)
    return written(spoilt).encode(), whole, f"messages: {what}", expect


def texts(draw: random.Random, names: list[str]) -> Table:
    """A text that a disk has spoilt."""
    whole = "\n\n".join(f"paragraph {i} says {'so ' * 60}" for i in range(60)).encode()
    content, what, expect = damage(draw, whole, parsed_text, OF_TABLE)
    return content, whole, what, expect


def parsed_text(content: bytes) -> list[str]:
    """The lines of a text in UTF-8."""
    try:
        text = content.decode("utf-8-sig")
    except ValueError as error:
        raise NoDocument(str(error)) from None
    if "\0" in text:
        raise NoDocument("a NUL")
    return text.split("\n")


TABLES = {"q.csv": csv_table, "q.json": json_table, "q.txt": texts}


def make(draw: random.Random, place: Place) -> Case:
    """``init`` of a folder with something wrong in it; nothing but its target may appear."""
    place.copy("images/a.png", "secret.png")
    name = draw.choice(("q.csv", "q.csv", "q.json", "q.txt"))
    names = []
    if name != "q.txt":
        for number in range(4):
            names.append(f"images/{number}.png")
            place.write(f"mine/{names[-1]}", place.copy("images/a.png", "one.png").read_bytes() + bytes([number]))
        (place.work / "one.png").unlink()
    content, whole, what, expect = TABLES[name](draw, names)
    path = place.write(f"mine/{name}", content)
    words, files = ["init", "mine"], {f"mine/{name}": whole}
    files |= {f"mine/{each}": (place.work / "mine" / each).read_bytes() for each in names}
    kind = draw.choice(("", "", "", "", "file", "target", "option", "second", "image"))
    if kind == "file":
        what, expect = f"{name}: {no_file(draw, path)}", Expect.REFUSED
    elif kind == "image" and names:
        what, expect = f"an image: {no_file(draw, place.work / 'mine' / names[0])}", Expect.REFUSED
    elif kind == "target":
        place.write(f"{MADE}/thesis.txt", "a year of work")
        words += draw.choice(([], ["--overwrite"]))
        what, expect = f"a target that is somebody's, {words[2:]}", Expect.REFUSED
    elif kind == "option":
        option = draw.choice(list(WRONG))
        words.append(f"{option}={draw.choice(WRONG[option])}")
        what, expect = f"{what}, {words[-1]!r}", Expect.REFUSED
    elif kind == "second" and name != "q.txt":
        place.write("mine/other.json", json.dumps([{"question": "a", "answer": "b"}]))
        what, expect = f"two tables, {what}", Expect.REFUSED
    reference = same(place, words, [MADE], files)
    if name == "q.csv":
        reference = both(reference, exactly(place, whole))
    return Case(f"init: {what}", words, expect, (MADE,), reference=reference)


WRONG = {
    "--image-column": ("", "nope", "../beside", "\x1b[31m"),
    "--question-column": ("nope", "/"),
    "--answer-column": ("nope", "a/b/c"),
    "--table": ("nope", "../beside", "/"),
    "--backbone": ("nope", "../beside", "mine"),
    "--out": ("../beside", "mine", "/"),
    "--seed": ("-1", "nope", ""),
}


def exactly(place: Place, table: bytes) -> Reference:
    """The splits hold the table's pictures, questions and answers, each once and as they are written."""

    def difference(answer: Answer) -> str | None:
        rows = [
            (row["image"], row["conversations"][0]["value"].removeprefix("<image>\n"), row["conversations"][1]["value"])
            for path in sorted((place.work / MADE).glob("*.json"))
            if not path.name.startswith(".")
            for row in json.loads(path.read_text())
        ]
        right = sorted(tuple(row) for row in parsed_csv(table)[1:])
        return None if sorted(rows) == right else f"{sorted(rows)[:2]} is not {right[:2]}"[:400]

    return difference
