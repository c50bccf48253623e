"""Calibration files of ``--eviction-option calibration=FILE``."""

from __future__ import annotations

import json
import random
from typing import Any

from tests.hostile.case import Case, Expect, Place
from tests.hostile.known import Format, change, damage_file, misplaced
from tests.hostile.references import same
from tests.hostile.values import HUGE, NAN, no_file, without, written

ALPHA, SHARES = ("numbers", "alpha"), ("numbers", "shares")
ANY: dict[tuple[Any, ...], tuple[Any, ...]] = {
    ("schema_version",): (0, 2, "1", 1.0, True, None, [], HUGE),
    ("method",): ("nope", "snapkv", 5, None, []),
    ("backbone",): (5, "x", [], None, {}),
    ("backbone", "digest"): (5, None, [], "0" * 64, ""),
    ("settings",): (5, [], "x", None),
    ("numbers",): (5, [], "x", None, {}, {"alpha": 1}),
    ("data",): (5, [], "x", None, {}),
    ("data", "samples"): ("x", 1.5, None, []),
}
OWN: dict[str, dict[tuple[Any, ...], tuple[Any, ...]]] = {
    "duo_attention": {
        ALPHA: (5, [], [[]], [5], [[0.5]], [[0.5, 0.5]] * 99, "x", None, {}),
        (*ALPHA, 0, 0): (-0.1, 1.1, NAN, "x", None, True, [], HUGE),
        ("numbers", "recent"): (0, -1, 1.5, "x", HUGE, None),
        ("numbers", "sinks"): (-1, 1.5, "x", HUGE, None),
    },
    "prefixkv": {
        SHARES: (5, [], [[]], [5], "x", None, {}),
        (*SHARES, 0, 0): (-0.1, 1.1, NAN, "x", None, True, [], HUGE),
        ("numbers", "keep"): (5, [], [0.5], [2.0] * 9, ["x"] * 9, None, {}),
    },
}
FORM = Format(
    more=("settings",),
    optional=("settings.*",),  # how it was made, for the reader
    legal={
        "settings.*": lambda value: True,  # of the method's own kinds
        "backbone.path": lambda value: isinstance(value, str),
        "backbone.revision": lambda value: value is None or isinstance(value, str),
    },
    exact=("schema_version", "method", "backbone.digest", "backbone.model_type"),
)


def make(draw: random.Random, place: Place) -> Case:
    """A file of one of the methods, spoilt."""
    method = draw.choice(list(OWN))
    original = json.loads((place.pool / f"calibrations/{method}.json").read_text())
    content, expect = original, Expect.REFUSED
    kind = draw.choice(("value", "value", "own", "own", "gone", "bytes", "mutated", "file", "control"))
    if kind in ("value", "own"):
        content, what, expect = misplaced(draw, original, ANY if kind == "value" else OWN[method])
    elif kind == "gone":
        key = (draw.choice(list(original)),)
        content, what = without(original, key), f"{key[0]} is gone"
    elif kind == "mutated":
        content, what, expect = change(draw, original, FORM)
    elif kind == "control":
        what, expect = "as it was made", Expect.TAKEN
    path = place.write("made.json", written(content))
    if kind == "bytes":
        what, expect = damage_file(draw, path, FORM)
    elif kind == "file":
        what = no_file(draw, path)
    act = [
        *("generate", "--backbone", str(place.pool / "backbones/tiny-llama"), "--prompt", "Code baran amber falcon."),
        *("--max-new-tokens", "1", "--device", "cpu", "--eviction", method, "--eviction-keep", "0.5"),
        *("--eviction-option", "calibration=made.json"),
    ]
    return Case(f"{method}: {what}", act, expect, reference=same(place, act, files={"made.json": written(original)}))
