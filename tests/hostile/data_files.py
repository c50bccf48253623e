"""Instruction data: records that break the format, files that are none, images that are elsewhere."""

from __future__ import annotations

import json
import random
from typing import Any

import yaml

from tests.hostile.case import Case, Expect, Place
from tests.hostile.pool import VLM
from tests.hostile.recipes import with_key
from tests.hostile.values import NAMES, changed, damaged, mutated, nested, no_file, shown, written

TURNS = [{"from": "human", "value": "<image>\nwhat ?"}, {"from": "gpt", "value": "yes"}]
TWO_IMAGES = [{"from": "human", "value": "<image><image>\nwhat ?"}, {"from": "gpt", "value": "yes"}]
INVALID: dict[tuple[Any, ...], tuple[Any, ...]] = {
    ("conversations",): (5, None, "x", [], {}, [[]], [5], [{}], TURNS[:1], TURNS[1:], TWO_IMAGES),
    ("conversations", 0): (5, None, "x", {}, {"from": "human"}, {"value": "x"}),
    ("conversations", 0, "from"): (5, None, "gpt", "system", [], "Human"),
    ("conversations", 0, "value"): (5, None, [], {}, "no picture", "<image><image>"),
    ("conversations", 1, "value"): (5, None, [], {}, "<image>"),
    ("conversations", 1, "from"): (5, None, "human", []),
    ("image",): (5, {}, True, [5], [None], [[]], ["a", "b"]),
}
OUTSIDE = (
    "../../beside/notes.txt",
    "../secret.png",
    "/etc/passwd",
    "dev/../../secret.png",
    "~/x.png",
    "\x00",
    "a" * 5000,
    "",
    ".",
    "dev",
)
"""Image names that mean nothing below the folder, or something outside of it."""


Rows = Any
Spoilt = tuple[Rows, str, Expect]


def invalid(draw: random.Random, rows: Rows) -> Spoilt:
    """A record that breaks the format."""
    row, key = draw.randrange(len(rows)), draw.choice(list(INVALID))
    value = draw.choice(INVALID[key])
    rows[row] = changed(rows[row], key, value)
    return rows, f"{'.'.join(map(str, key))} is {shown(value)}", Expect.REFUSED


def image(draw: random.Random, rows: Rows) -> Spoilt:
    """An image that is elsewhere; seen once it is opened."""
    name = draw.choice(OUTSIDE)
    rows[0]["image"] = name
    return rows, f"image is {shown(name)}", Expect.EITHER if name == "" else Expect.REFUSED


def anything(draw: random.Random, rows: Rows) -> Spoilt:
    """Anything in a record."""
    row = draw.randrange(len(rows))
    rows[row], what = mutated(draw, rows[row])
    return rows, what, Expect.EITHER


def names(draw: random.Random, rows: Rows) -> Spoilt:
    """A name that means something to somebody."""
    key, value = draw.choice(("id", "kind")), draw.choice(NAMES)
    rows[draw.randrange(len(rows))][key] = value
    return rows, f"{key} is {shown(value)}", Expect.EITHER


def whole_file(draw: random.Random, rows: Rows) -> Spoilt:
    """No list of records at all."""
    content = draw.choice(([], {}, None, 5, "x", [5], [None], [[]], {"data": rows}, nested(3000, True)))
    return content, "the file holds something else", Expect.REFUSED


def bytes_of_it(draw: random.Random, rows: Rows) -> Spoilt:
    """A file that a disk has spoilt."""
    return *damaged(draw, written(rows).encode()), Expect.EITHER


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
    return _reading(draw, place, f"scenes/{path.name}", what, expect, kind not in (image, other_image))


def _reading(draw: random.Random, place: Place, file: str, what: str, expect: Expect, read_all: bool) -> Case:
    """The data file given to something that reads all of it, or opens its first image."""
    way = draw.choice(("library", "images", "check", "preview", "fit", "evaluate"))
    may = Expect.EITHER if expect is Expect.REFUSED and not read_all else expect
    if way == "library":
        from subtoken_train.datasets.image_sources import open_image
        from subtoken_train.datasets.records import InstructionRecords

        def read() -> None:
            records = InstructionRecords(place.work / file)
            for index in range(len(records)):
                for image in records[index].images:
                    open_image(image, records[index].id)

        return Case(f"InstructionRecords {what}", read, expect)
    if way == "images":
        words = ["data", "images", "--file", file, "--root", "scenes"]
        return Case(f"data images: {what}", words, may)
    if way == "evaluate":
        words = ["evaluate", "--adapter", str(place.pool / "adapters" / VLM), "--data", file, "--max-new-tokens", "1"]
        return Case(f"evaluate --data: {what}", words, expect)
    recipe = yaml.safe_load((place.pool / f"{VLM}.yaml").read_text())
    place.write("recipe.yaml", yaml.safe_dump(with_key(recipe, "data.train_file", file)))
    if way == "preview":
        return Case(f"preview: {what}", ["preview", "--config", "recipe.yaml", "--count", "8"], may)
    if way == "check":
        return Case(f"check: {what}", ["check", "--config", "recipe.yaml"], may)
    return Case(f"fit: {what}", ["fit", "--config", "recipe.yaml", "--trainer.max_steps=4"], may, ("run",))
