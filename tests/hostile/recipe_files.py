"""Recipe files that are no good YAML, hold more than they show, or are no files."""

from __future__ import annotations

import random

from tests.hostile.case import Case, Expect, Place
from tests.hostile.known import damage_file, parsed_yaml
from tests.hostile.pool import LM, VLM
from tests.hostile.recipes import FORM, TENSORS, parsing
from tests.hostile.references import same
from tests.hostile.values import no_file

BOMB = "\n".join(
    [
        "a0: &a0 [x, x, x, x, x, x, x, x, x, x]",
        *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)),
    ]
)
MAPS = "\n".join(
    ["m0: &m0 {a: 1}", *(f"m{i}: &m{i} {{{', '.join(f'k{j}: *m{i - 1}' for j in range(9))}}}" for i in range(1, 9))]
)
TEXTS = {
    "an alias bomb": BOMB,
    "an alias bomb of mappings": MAPS,
    "an alias that holds itself": "model: &a\n  lora: *a",
    "a list that holds itself": "a: &a [*a, *a]",
    "lists 5000 deep": "a: " + "[" * 5000 + "]" * 5000,
    "mappings 3000 deep": "a: " + "{a: " * 3000 + "1" + "}" * 3000,
    "a block 900 deep": "\n".join(f"{' ' * i}a{i}:" for i in range(900)),
    "a Python object": "x: !!python/object/apply:os.system ['touch ../CANARY']",
    "a Python module": "x: !!python/module:hostile_canary",
    "a Python name": "x: !!python/name:hostile_canary.call",
    "a new Python object": "x: !!python/object/new:hostile_canary.Callback []",
    "a tag of its own": "x: !include /etc/passwd",
    "two documents": "a: 1\n---\nb: 2",
    "a key twice": "model: {}\nmodel: {}",
    "a key twice, deep": "model:\n  lora: {rank: 1, rank: 2}",
    "a list as a key": "? [a, b]\n: 1",
    "a mapping as a key": "? {a: b}\n: 1",
    "a date that there is not": "x: 2024-99-99",
    "a timestamp as a key": "2024-01-01: 1",
    "a number as a key": "5: 1",
    "null as a key": "~: 1",
    "a merge of nothing": "x: {<<: 5}",
    "a merge of itself": "x: &x {<<: *x}",
    "an unknown alias": "x: *nowhere",
    "a tab": "model:\n\tlora: 1",
    "an open quote": 'x: "abc',
    "an open bracket": "x: [1, 2",
    "a number of 10,000 digits": "seed_everything: " + "9" * 10_000,
    "a binary that is none": "x: !!binary '%%%'",
    "a sexagesimal": "seed_everything: 190:20:30",
    "a float of thousands of digits": "x: 0." + "1" * 20_000,
    "a line of a million letters": "x: " + "a" * 1_000_000,
    "ten thousand keys": "\n".join(f"k{i}: {i}" for i in range(10_000)),
    "an omap": "x: !!omap [a: 1, a: 2]",
    "a set": "x: !!set {a, b}",
    "a control character": "x: \x07",
    "a directive": "%YAML 9.9\n---\na: 1",
    "a text alone": "only words",
    "a list alone": "- 1\n- 2",
    "a number alone": "5",
    "bytes of a pickle": "\x80\x04c",
}


def make(draw: random.Random, place: Place) -> Case:
    """A recipe whose file is the trouble."""
    content = (place.pool / f"{draw.choice((VLM, LM))}.yaml").read_bytes()
    kind, expect = draw.choice(("text", "text", "text", "damage", "damage", "file", "control")), Expect.REFUSED
    name = draw.choice(
        ("recipe.yaml", "recipe.yaml", "re cipe.yaml", "[red]recipe.yaml", "recipe\x1b[31m.yaml", "réçipe.yaml")
    )
    whole = content
    if kind == "text":
        what = draw.choice(list(TEXTS))
        alone = draw.random() < 0.5 or what.endswith(" alone") or what in ("a directive", "two documents")
        content = (b"" if alone else content) + TEXTS[what].encode() + b"\n"
        place.write(name, content)
    elif kind == "damage":
        what, expect = damage_file(draw, place.write(name, content), FORM, parsed_yaml)
    elif kind == "file":
        what = no_file(draw, place.write(name, content))
    else:
        what, expect = "valid", Expect.TAKEN
        place.write(name, content)
    built = kind == "damage" and expect is Expect.REFUSED
    words, writes = parsing(draw, name, train=kind != "damage", built=built)
    reference = same(place, words, TENSORS if words[0] == "fit" else (), {name: whole})
    return Case(f"{words[0]} {name!r}: {what}", words, expect, writes, reference=reference)
