"""Folders of one's own data for ``init``: tables, names of images and whole folders with something wrong in them."""

from __future__ import annotations

import json
import random

from tests.hostile.case import Case, Expect, Place
from tests.hostile.data_files import OUTSIDE
from tests.hostile.values import NAMES, damaged, mutated, no_file, shown, written

HEADERS = ("image,question,answer", "file;prompt;label", "a,b,c", "image,question", "image,question,image", "", ",,")
OPTIONS = ("--image-column", "--question-column", "--answer-column", "--table", "--backbone", "--out", "--seed")


def cell(text: str) -> str:
    """A cell of a CSV file."""
    return '"' + text.replace('"', '""') + '"'


def csv_table(draw: random.Random, names: list[str]) -> tuple[bytes, str, Expect]:
    """A table whose columns, cells or bytes are odd."""
    rows = [[name, f"list {i} .", "none"] for i, name in enumerate(names)]
    kind = draw.choice(("header", "cell", "outside", "two answers", "bytes", "bytes", "whole"))
    header, expect, what = HEADERS[0], Expect.EITHER, kind
    if kind == "header":
        header = draw.choice(HEADERS[2:])
        expect, what = Expect.REFUSED, f"header {header!r}"
    elif kind == "cell":
        value = draw.choice(NAMES)
        rows[draw.randrange(len(rows))][draw.randrange(3)] = value
        what = f"a cell is {shown(value)}"
    elif kind == "outside":
        value = draw.choice(OUTSIDE)
        rows[0][0] = value
        expect, what = Expect.REFUSED, f"an image is {shown(value)}"
    elif kind == "two answers":
        rows.append([names[0], "list 0 .", "7"])
        expect = Expect.REFUSED
    elif kind == "whole":
        expect = Expect.TAKEN
    text = "\n".join([header, *(",".join(map(cell, row)) for row in rows)]) + "\n"
    content = text.encode("utf-8", "surrogatepass")
    if kind == "bytes":
        content, what = damaged(draw, content)
    return content, what, expect


def json_table(draw: random.Random, names: list[str]) -> tuple[bytes, str, Expect]:
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
    if draw.random() < 0.2:
        return written(rows).encode(), "whole messages", Expect.TAKEN
    spoilt, what = mutated(draw, rows)
    content, more = written(spoilt).encode(), ""
    if draw.random() < 0.2:
        content, more = damaged(draw, content)
    return content, f"messages: {what} {more}", Expect.EITHER


def texts(draw: random.Random, names: list[str]) -> tuple[bytes, str, Expect]:
    """A text that a disk has spoilt."""
    content = "\n\n".join(f"paragraph {i} says {'so ' * 60}" for i in range(60)).encode()
    return *damaged(draw, content), Expect.EITHER


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
    content, what, expect = TABLES[name](draw, names)
    path = place.write(f"mine/{name}", content)
    words = ["init", "mine"]
    kind = draw.choice(("", "", "", "file", "target", "option", "second", "image"))
    if kind == "file":
        what, expect = f"{name}: {no_file(draw, path)}", Expect.REFUSED
    elif kind == "image" and names:
        what, expect = f"an image: {no_file(draw, place.work / 'mine' / names[0])}", Expect.REFUSED
    elif kind == "target":
        place.write("mine_subtoken/thesis.txt", "a year of work")
        words += draw.choice(([], ["--overwrite"]))
        what, expect = f"a target that is somebody's, {words[2:]}", Expect.REFUSED
    elif kind == "option":
        option, value = (
            draw.choice(OPTIONS),
            draw.choice(("", "nope", "../beside", "mine", "-1", "\x1b[31m", "/", "a/b/c")),
        )
        words.append(f"{option}={value}")
        what, expect = f"{what}, {words[-1]!r}", Expect.EITHER
    elif kind == "second":
        place.write("mine/other.json", json.dumps([{"question": "a", "answer": "b"}]))
        what, expect = f"two tables, {what}", Expect.EITHER if name == "q.txt" else Expect.REFUSED
    return Case(f"init: {what}", words, expect, ("mine_subtoken", "nope", "a", "-1", "../beside/mine", "\x1b[31m"))
