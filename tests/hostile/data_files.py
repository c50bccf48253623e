"""Instruction data: records that break the format, files that are none, images that are elsewhere."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import yaml

from tests.hostile.case import Case, Expect, Place
from tests.hostile.known import Format, change, damage, misplaced, parsed_json, parsed_lines
from tests.hostile.pool import VLM
from tests.hostile.recipes import TENSORS, with_key
from tests.hostile.references import made, same
from tests.hostile.values import NAMES, nested, no_file, shown, written

TURNS = [{"from": "human", "value": "<image>\nwhat ?"}, {"from": "gpt", "value": "yes"}]
TWO_IMAGES = [{"from": "human", "value": "<image><image>\nwhat ?"}, {"from": "gpt", "value": "yes"}]
INVALID: dict[tuple[Any, ...], tuple[Any, ...]] = {
    ("conversations",): (5, None, "x", [], {}, [[]], [5], [{}], TURNS[:1], TURNS[1:], TWO_IMAGES),
    ("conversations", 0): (5, None, "x", {}, {"from": "human"}, {"value": "x"}),
    ("conversations", 0, "from"): (5, None, "gpt", "system", [], "Human"),
    ("conversations", 0, "value"): (5, None, [], {}, "no picture", "<image><image>", ""),
    ("conversations", 1, "value"): (
        *(5, None, [], {}, "<image>", "", " ", "\n\t", "\x00", "\u200b", "\ufeff", "\u2060\u200d", "yes\x00"),
    ),
    ("conversations", 1, "from"): (5, None, "human", []),
    ("image",): (5, {}, True, [5], [None], [[]], ["a", "b"]),
}
OUTSIDE = (
    *("../../beside/notes.txt", "../secret.png", "/etc/passwd", "dev/../../secret.png", "~/x.png"),
    *("\x00", "a" * 5000, "", ".", "dev"),
)
"""Image names that mean nothing below the folder, or something outside of it."""


FORM = Format(
    legal={
        "*.id": lambda value: isinstance(value, str) or type(value) is int,
        "*.kind": lambda value: isinstance(value, str),
        "*.image": lambda value: isinstance(value, str | list),
        "*.conversations.*.from": lambda value: value in ("human", "gpt"),
        "*.conversations.*.value": lambda value: isinstance(value, str),
    },
    unsaid=("*.id", "*.kind", "*.kind.*", "*.*", "*.conversations.*.*"),
)
NAMED = tuple(name for name in NAMES if name.strip() and name.isprintable())
Rows = Any
Spoilt = tuple[Rows, str, Expect]


def invalid(draw: random.Random, rows: Rows) -> Spoilt:
    """A record that breaks the format."""
    row = draw.randrange(len(rows))
    rows[row], what, expect = misplaced(draw, rows[row], INVALID)
    return rows, what, expect


def image(draw: random.Random, rows: Rows) -> Spoilt:
    """An image that is elsewhere; seen once it is opened."""
    name = draw.choice(OUTSIDE)
    rows[0]["image"] = name
    return rows, f"image is {shown(name)}", Expect.REFUSED


def anything(draw: random.Random, rows: Rows) -> Spoilt:
    """Anything in a record."""
    return change(draw, rows, FORM)


def names(draw: random.Random, rows: Rows) -> Spoilt:
    """A name that means something to somebody."""
    key, value = draw.choice(("id", "kind")), draw.choice(NAMED)
    rows[draw.randrange(len(rows))][key] = value
    return rows, f"{key} is {shown(value)}", Expect.TAKEN


def whole_file(draw: random.Random, rows: Rows) -> Spoilt:
    """No list of records at all."""
    content = draw.choice(([], {}, None, 5, "x", [5], [None], [[]], {"data": rows}, nested(3000, True)))
    return content, "the file holds something else", Expect.REFUSED


def bytes_of_it(draw: random.Random, rows: Rows) -> Spoilt:
    """A file that a disk has spoilt."""
    return damage(draw, written(rows).encode(), marked, FORM)


def marked(content: bytes) -> Any:
    """A JSON document, with or without a byte-order mark."""
    return parsed_json(content.removeprefix(b"\xef\xbb\xbf"))


def other_file(draw: random.Random, rows: Rows) -> Spoilt:
    """Something that is no file in the place of the data."""
    return None, "data", Expect.REFUSED


def other_image(draw: random.Random, rows: Rows) -> Spoilt:
    """Something that is no file in the place of an image; seen once it is opened."""
    return rows, "image", Expect.REFUSED


def nothing(draw: random.Random, rows: Rows) -> Spoilt:
    """A whole file."""
    return rows, "whole", Expect.TAKEN


KINDS = (
    invalid, invalid, invalid, image, image, anything, anything, bytes_of_it, bytes_of_it, names, whole_file,
    other_file,
    other_image, nothing,
)  # fmt: skip


def make(draw: random.Random, place: Place) -> Case:
    """A data file with something wrong in it."""
    place.copy("scenes", "scenes")
    place.copy("images/a.png", "secret.png")
    path = place.work / "scenes/train.json"
    rows = json.loads(path.read_text())
    first = place.work / "scenes" / rows[0]["image"]
    kind = draw.choice(KINDS)
    content, what, expect = kind(draw, rows)
    lines = draw.random() < 0.3 and isinstance(content, list) and kind is not whole_file
    path = path.with_suffix(".jsonl") if lines else path
    if not isinstance(content, bytes):
        content = "".join(written(each) + "\n" for each in content) if lines else written(content)
        content = content.encode()
    path.write_bytes(content)
    if kind in (other_file, other_image):
        what = f"{what}: {no_file(draw, path if kind is other_file else first)}"
    ways = ["library", "fit"] if kind is names else ["library", "fit", "evaluate"]
    if kind not in (names, other_image):  # which a listing does not see
        ways.append("images")
    if kind not in (image, other_image, names):
        ways += ["check", "preview"]
    return reading(draw.choice(ways), place, f"scenes/{path.name}", what, expect, opened=kind is other_image)


def expected(path: Path) -> list[tuple[str, list[str], list[tuple[str, str]], Any]]:
    """Ids, pictures, exchanges and kinds of a file in LLaVA's plain form, read by hand."""
    content = path.read_bytes()
    rows = parsed_lines(content) if path.suffix == ".jsonl" else marked(content)
    return [
        (
            str(row["id"]),
            [str(path.parent / row["image"])],
            [(row["conversations"][0]["value"], row["conversations"][1]["value"])],
            row.get("kind"),
        )
        for row in rows
    ]


def reading(way: str, place: Place, file: str, what: str, expect: Expect, opened: bool = False) -> Case:
    """The data file given to something that reads all of it, and opens its images.

    What is seen when an image is ``opened`` ends a training that has begun, whose logs stay and are named.
    """
    path = place.work / file
    if way == "library":
        return Case(
            f"InstructionRecords {what}",
            lambda: records(path),
            expect,
            reference=made(lambda: expected(path)),
        )
    words, writes = ["data", "images", "--file", file, "--root", "scenes"], ()
    adapter = str(place.pool / "adapters" / VLM)
    if way == "evaluate":
        words = ["evaluate", "--adapter", adapter, "--data", file, "--max-new-tokens", "1"]
    elif way != "images":
        recipe = yaml.safe_load((place.pool / f"{VLM}.yaml").read_text())
        place.write("recipe.yaml", yaml.safe_dump(with_key(recipe, "data.train_file", file)))
        words = [way, "--config", "recipe.yaml", *(["--count", "8"] if way == "preview" else [])]
        words += ["--trainer.max_steps=4"] if way == "fit" else []
    files = {file: whole_rows(place, file)}
    if way in ("check", "preview", "fit"):
        files["recipe.yaml"] = (place.work / "recipe.yaml").read_text()
    reference = same(place, words, TENSORS if way == "fit" else (), files)
    run = ("run",) if way == "fit" else writes
    return Case(f"{words[0]}: {what}", words, expect, run, run if opened else (), reference=reference)


def whole_rows(place: Place, file: str) -> str:
    """The rows of the original, as a file of that name holds them."""
    rows = json.loads((place.pool / "scenes/train.json").read_text())
    return "".join(written(row) + "\n" for row in rows) if file.endswith("l") else written(rows)


def records(path: Path) -> list[Any]:
    """All records of a file, every image opened."""
    from subtoken_train.datasets.image_sources import open_image
    from subtoken_train.datasets.records import InstructionRecords

    found = InstructionRecords(path)
    for record in (found[index] for index in range(len(found))):
        for image in record.images:
            open_image(image, record.id)
    read = []
    for record in (found[index] for index in range(len(found))):
        turns = [(turn.prompt, turn.answer) for turn in record.turns]
        read.append((record.id, [str(each) for each in record.images], turns, record.kind))
    return read
