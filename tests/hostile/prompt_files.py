"""Files of ``generate --prompts``: lines that cannot be asked, and answers that were begun otherwise."""

from __future__ import annotations

import json
import random
from typing import Any

from tests.hostile.case import Case, Expect, Place
from tests.hostile.data_files import OUTSIDE
from tests.hostile.known import Format, change, damage, parsed_lines
from tests.hostile.pool import LM, VLM
from tests.hostile.references import same
from tests.hostile.values import NAMES, changed, no_file, shown, written

INVALID: dict[str, tuple[Any, ...]] = {
    "prompt": (5, None, [], {}, "", " ", "\n", "\ud800"),
    "id": ([], {}, "b", True, 1.5),
    "images": (5, [5], {}, ["nowhere.png"]),
    "image": (5, {}, True, *(name for name in OUTSIDE if name not in ("", "dev"))),
    "temperature": (1,),
    "system": ("x",),
    "messages": ([],),
}
FORM = Format(
    legal={
        "*.prompt": lambda value: isinstance(value, str) and bool(value.strip()),
        "*.id": lambda value: isinstance(value, str) or type(value) is int,
        "*.image": lambda value: isinstance(value, str | list),
    },
    unsaid=("*.id", "*.image"),
)
SAFE = tuple(name for name in NAMES if name.strip() and name.isprintable() and "<image>" not in name)


def make(draw: random.Random, place: Place) -> Case:
    """A file of three prompts with one thing wrong in it."""
    vision = draw.random() < 0.5
    place.copy("images/a.png", "a.png")
    place.copy("images/a.png", "../secret.png")
    picture = {"image": "a.png"} if vision else {}
    rows: list[dict[str, Any]] = [{"id": name, "prompt": f"what is at {name} ?", **picture} for name in ("a", "b", "c")]
    whole, expect = "".join(written(row) + "\n" for row in rows), Expect.REFUSED
    kind = draw.choice(("invalid", "invalid", "mutated", "bytes", "bytes", "file", "names", "begun", "control"))
    content: bytes = whole.encode()
    if kind == "invalid":
        key = draw.choice(list(INVALID) if vision else [key for key in INVALID if not key.startswith("image")])
        value = draw.choice(INVALID[key])
        rows[0] = {**rows[0], key: value}
        if key == "images":
            del rows[0]["image"]
        content, what = "".join(written(row) + "\n" for row in rows).encode(), f"{key} is {shown(value)}"
    elif kind == "mutated":
        spoilt, what, expect = change(draw, rows, FORM)
        content = ("".join(written(row) + "\n" for row in spoilt) if isinstance(spoilt, list) else "5\n").encode()
    elif kind == "bytes":
        content, what, expect = damage(draw, content, parsed_lines, FORM)
    elif kind == "names":
        value = draw.choice(SAFE)
        rows = changed(rows, (1, "id"), value)
        what, expect = f"id is {shown(value)}", Expect.TAKEN
        whole = "".join(written(row) + "\n" for row in rows)
        content = whole.encode()
    elif kind == "begun":
        what = "an output that somebody else has begun"
        place.write("out.jsonl", json.dumps({"id": "a", "answer": "mine"}) + "\n")
    else:
        what, expect = "whole", Expect.TAKEN
    path = place.write("asked.jsonl", content)
    if kind == "file":
        what, expect = no_file(draw, path), Expect.REFUSED
    adapter = str(place.pool / "adapters" / (VLM if vision else LM))
    words = ["generate", "--adapter", adapter, "--prompts", "asked.jsonl", "--output", "out.jsonl"]
    words += ["--max-new-tokens", "2", "--batch-size", draw.choice("12")]
    reference = same(place, words, ["out.jsonl"], {"asked.jsonl": whole})
    writes = ("out.jsonl", "out.jsonl.records")
    return Case(f"generate --prompts: {what}", words, expect, writes, reference=reference)
