"""Instruction data: records that break the format, files that are none, images that are elsewhere."""

from __future__ import annotations

import json
import random
from typing import Any

import yaml

from hostile.case import Case, Expect, Place
from hostile.pool import VLM
from hostile.recipes import with_key
from hostile.values import NAMES, changed, damaged, mutated, nested, no_file, shown, written

TURNS = [{"from": "human", "value": "<image>\nwhat ?"}, {"from": "gpt", "value": "yes"}]
TWO_IMAGES = [{"from": "human", "value": "<image><image>\nwhat ?"}, {"from": "gpt", "value": "yes"}]
INVALID: dict[tuple[Any, ...], tuple[Any, ...]] = {
    ("conversations",): (5, None, "x", [], {}, [[]], [5], [{}], TURNS[:1], TURNS[1:], TWO_IMAGES, [*TURNS, *TURNS]),
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


def make(draw: random.Random, place: Place) -> Case:
    """A data file with something wrong in it."""
    place.copy("scenes", "scenes")
    place.copy("images/a.png", "secret.png")
    path = place.work / "scenes/train.json"
    rows = json.loads(path.read_text())
    row = draw.choice((0, 0, draw.randrange(len(rows))))
    kind = draw.choice(
        (
            "invalid",
            "invalid",
            "invalid",
            "image",
            "image",
            "mutated",
            "mutated",
            "damage",
            "damage",
            "file",
            "whole file",
            "names",
            "control",
        )
    )
    expect, read_all = Expect.REFUSED, True
    if kind == "invalid":
        key = draw.choice(list(INVALID))
        value = draw.choice(INVALID[key])
        if value == [*TURNS, *TURNS]:
            value = TWO_IMAGES
        rows[row], what = changed(rows[row], key, value), f"{'.'.join(map(str, key))} is {shown(value)}"
    elif kind == "image":
        name = draw.choice(OUTSIDE)
        rows[row]["image"], what = name, f"image is {shown(name)}"
        read_all = False
        if name == "":
            expect = Expect.EITHER
    elif kind == "mutated":
        rows[row], what = mutated(draw, rows[row])
        expect = Expect.EITHER
    elif kind == "names":
        key, value = draw.choice(("id", "kind")), draw.choice(NAMES)
        rows[row][key] = value
        what, expect = f"{key} is {shown(value)}", Expect.EITHER
    elif kind == "whole file":
        rows = draw.choice(([], {}, None, 5, "x", [5], [None], [[]], {"data": rows}, nested(3000, True)))
        what = f"the file holds {shown(rows) if not isinstance(rows, list) or len(rows) != 1 else 'a list of one'}"
    else:
        what = "whole"
        expect = Expect.TAKEN if kind == "control" else Expect.EITHER
    content = written(rows).encode()
    if draw.random() < 0.3 and isinstance(rows, list) and kind != "whole file":
        path = path.with_suffix(".jsonl")
        content = "".join(written(each) + "\n" for each in rows).encode()
    if kind == "damage":
        content, what = damaged(draw, content)
    path.write_bytes(content)
    if kind == "file":
        image = draw.random() < 0.5
        target = place.work / "scenes" / rows[0]["image"] if image else path
        what, expect, read_all = f"{target.name}: {no_file(draw, target)}", Expect.REFUSED, not image
    return _reading(draw, place, f"scenes/{path.name}", what, expect, read_all)


def _reading(draw: random.Random, place: Place, file: str, what: str, expect: Expect, read_all: bool) -> Case:
    """The data file given to something that reads all of it, or opens its first image."""
    way = draw.choice(("library", "images", "check", "preview", "fit", "evaluate"))
    may = Expect.EITHER if expect is Expect.REFUSED and not read_all else expect
    if way == "library":
        from subtoken_train.datasets.records import InstructionRecords, open_image

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
