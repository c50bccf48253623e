"""Grids of ``evaluate --config``."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from typing import Any

import yaml

from tests.hostile.case import Answer, Case, Expect, Place, Reference
from tests.hostile.known import Format, change, damage, misplaced, parsed_yaml
from tests.hostile.recipe_files import TEXTS
from tests.hostile.references import both, same
from tests.hostile.values import HUGE, NAN, as_yaml, no_file, shown, without

NUMBER = ("x", [], {}, 1.5, NAN, True)
INVALID: dict[tuple[Any, ...], tuple[Any, ...]] = {
    ("batch_size",): (*NUMBER, 0, -1),
    ("limit",): (*NUMBER, 0, -1),
    ("anchors",): ("perhaps", 5, []),
    ("out",): (5, None, [], ""),
    ("tasks",): (5, None, "scenes_pope", {}, []),
    ("arms",): (5, None, "x", {}, []),
    ("tasks", 0): (5, None, [], "nope", {"name": 5}, {}),
    ("tasks", 0, "name"): (5, None, [], "nope", "../x", "os.system"),
    ("tasks", 0, "source"): (5, [], "nowhere/at/all", "/dev/null", "", "x" * 5000, "\x00"),
    ("arms", 0): (5, None, [], "x", {}),
    ("arms", 0, "adapter"): (5, [], {}, "", "nowhere/at/all", [5], "x" * 5000, ["", ""]),
    ("arms", 0, "backbone"): (5, [], {}, "", "nowhere/at/all"),
}
MORE: dict[str, tuple[Any, ...]] = {
    "eviction": ("nope", 5, [], {}, "snapkv"),
    "eviction_keep": (0.5, "x", -1, []),
    "eviction_every": (0, -1, 1.5, "x", True, []),
    "keep_ratio": (0, -1, 2, "x", NAN, []),
    "reducer": ("nope", 5, []),
    "selector": ("nope", 5, []),
    "protocol": ("nope", 5, []),
    "kv_dtype": ("nope", 5, []),
    "scope": ("nope", 5, []),
    "prefill_chunk": ("x", 0, -1, 1.5, True, []),
    "rerotate": ("x", 5, True, []),
    "name": (5, "../x", "a/b", "", ".", "..", []),
    "seed": ("x", 1.5, []),
    "unknown": (1,),
    "reducer_options": (5, {"layer": -1}, {"unknown": 1}, []),
    "eviction_options": (5, {"x": 1}, []),
}


FORM = Format(
    legal={
        "batch_size": lambda value: type(value) is int and value > 0,
        "limit": lambda value: value is None or (type(value) is int and value > 0),
        "out": lambda value: isinstance(value, str) and value != "",
        "anchors": lambda value: value in ("none", "auto", "all"),
        "arms.0.backbone": lambda value: isinstance(value, str | None),
        "arms.0.adapter": lambda value: isinstance(value, str | list),
        "arms.0.adapter.0": lambda value: isinstance(value, str),
        "tasks.0": lambda value: isinstance(value, str | dict),
        "tasks.0.source": lambda value: isinstance(value, str | None),
        "arms": lambda value: isinstance(value, list) and len(value) > 1,
        "tasks": lambda value: isinstance(value, list) and len(value) > 1,
    },
    exact=("tasks.0.name",),
    unsaid=("arms.0.backbone", "arms.0.adapter", "batch_size", "limit", "anchors"),
    # an adapter names its backbone, a backbone without an adapter is an arm, and a default is null as well
)
Grid = dict[str, Any]
Spoilt = tuple[Any, str, Expect]
"""A grid or its bytes, what was done, and what must come of it."""


def invalid(draw: random.Random, grid: Grid) -> Spoilt:
    """A value that cannot be."""
    return misplaced(draw, grid, INVALID)


def more(draw: random.Random, grid: Grid) -> Spoilt:
    """A setting of an arm that cannot be, or lacks what it goes with."""
    return misplaced(draw, grid, {("arms", 0, key): values for key, values in MORE.items()})


def eviction(draw: random.Random, grid: Grid) -> Spoilt:
    """A budget from nothing to without end."""
    settings = {
        "eviction": draw.choice(("snapkv", "knorm", "streaming_llm", "random", "kvcompose")),
        "eviction_keep": draw.choice(KEEPS),
        "scope": draw.choice(("all", "context", "nope", None)),
    }
    what = f"{settings['eviction']} {shown(settings['eviction_keep'])} {settings['scope']}"
    arm = {**grid["arms"][0], **settings}
    right = settings["eviction_keep"] in RIGHT and settings["scope"] in ("all", "context", None)
    return {**grid, "arms": [arm]}, what, Expect.TAKEN if right else Expect.REFUSED


def gone(draw: random.Random, grid: Grid) -> Spoilt:
    """A key that every grid has."""
    key = draw.choice(("tasks", "arms", "out"))
    return without(grid, (key,)), f"{key} is gone", Expect.REFUSED


def anything(draw: random.Random, grid: Grid) -> Spoilt:
    """Anything anywhere."""
    return change(draw, grid, FORM)


def text(draw: random.Random, grid: Grid) -> Spoilt:
    """YAML that is none, or that holds more than it shows."""
    what = draw.choice(list(TEXTS))
    return TEXTS[what].encode(), what, Expect.REFUSED


def bytes_of_it(draw: random.Random, grid: Grid) -> Spoilt:
    """A file that a disk has spoilt."""
    return damage(draw, as_yaml(grid, draw).encode(), parsed_yaml, FORM)


def nothing(draw: random.Random, grid: Grid) -> Spoilt:
    """A whole grid."""
    return grid, "whole", Expect.TAKEN


KEEPS = (0, 0.5, 1, 1.5, "0.5", "0", "20MB", "3tokens", "-3tokens", "NaN", "1e400", "", "5%", HUGE)
RIGHT = (0.5, 1, "0.5", "20MB", "3tokens")
KINDS = (invalid, invalid, invalid, more, more, anything, anything, gone, text, bytes_of_it, eviction, nothing)


def make(draw: random.Random, place: Place) -> Case:
    """A grid with one thing wrong in it; what is right is run on one question."""
    grid = yaml.safe_load((place.pool / "grid.yaml").read_text())
    grid["limit"] = 1
    grid["tasks"], grid["arms"][0]["adapter"] = grid["tasks"][:1], grid["arms"][0]["adapter"][:1]
    kind, whole = draw.choice(KINDS), deepcopy(grid)
    content, what, expect = kind(draw, grid)
    if not isinstance(content, bytes):
        content = as_yaml(content, draw).encode("utf-8", "surrogatepass")
    path = place.write("grid.yaml", content)
    if draw.random() < 0.05:
        what, expect = no_file(draw, path), Expect.REFUSED
    words = ["evaluate", "--config", "grid.yaml", "--out", "results"]
    if what.startswith("out"):
        words = words[:3]
    right = content if kind is eviction else as_yaml(whole, draw).encode()
    reference = same(place, words, ["results"], {"grid.yaml": right})
    if kind is eviction and expect is Expect.TAKEN:
        reference = both(reference, evicted(place))
    return Case(
        f"evaluate --config: {what}", words, expect, (".",) if len(words) == 3 else ("results",), reference=reference
    )


def evicted(place: Place) -> Reference:
    """The arm that ran is the one that was asked for: its manifest names the eviction and what it keeps."""

    def difference(answer: Answer) -> str | None:
        arm = yaml.safe_load((place.work / "grid.yaml").read_text())["arms"][0]
        path = next((place.work / "results").rglob("manifest.json"))
        named = json.loads(path.read_text())["arm"]["eviction"]
        return None if arm["eviction"] in named or arm["eviction_keep"] == 1 else f"the manifest says {named!r}"

    return difference
