"""Grids of ``evaluate --config``."""

from __future__ import annotations

import random
from typing import Any

import yaml

from tests.hostile.case import Case, Expect, Place
from tests.hostile.recipe_files import TEXTS
from tests.hostile.values import HUGE, NAN, as_yaml, changed, damaged, mutated, no_file, shown, without

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


Grid = dict[str, Any]
Spoilt = tuple[Any, str, Expect]
"""A grid or its bytes, what was done, and what must come of it."""


def invalid(draw: random.Random, grid: Grid) -> Spoilt:
    """A value that cannot be."""
    key = draw.choice(list(INVALID))
    value = draw.choice(INVALID[key])
    return changed(grid, key, value), f"{'.'.join(map(str, key))} is {shown(value)}", Expect.REFUSED


def more(draw: random.Random, grid: Grid) -> Spoilt:
    """A setting of an arm that cannot be, or lacks what it goes with."""
    key = draw.choice(list(MORE))
    value = draw.choice(MORE[key])
    return changed(grid, ("arms", 0, key), value), f"arms.0.{key} is {shown(value)}", Expect.REFUSED


def eviction(draw: random.Random, grid: Grid) -> Spoilt:
    """A budget from nothing to without end."""
    settings = {
        "eviction": draw.choice(("snapkv", "knorm", "streaming_llm", "random", "kvcompose")),
        "eviction_keep": draw.choice(KEEPS),
        "scope": draw.choice(("all", "context", "nope", None)),
    }
    what = f"{settings['eviction']} {shown(settings['eviction_keep'])} {settings['scope']}"
    arm = {**grid["arms"][0], **settings}
    return {**grid, "arms": [arm]}, what, Expect.EITHER


def gone(draw: random.Random, grid: Grid) -> Spoilt:
    """A key that every grid has."""
    key = draw.choice(("tasks", "arms", "out"))
    return without(grid, (key,)), f"{key} is gone", Expect.REFUSED


def anything(draw: random.Random, grid: Grid) -> Spoilt:
    """Anything anywhere."""
    return *mutated(draw, grid), Expect.EITHER


def text(draw: random.Random, grid: Grid) -> Spoilt:
    """YAML that is none, or that holds more than it shows."""
    what = draw.choice(list(TEXTS))
    return TEXTS[what].encode(), what, Expect.REFUSED


def bytes_of_it(draw: random.Random, grid: Grid) -> Spoilt:
    """A file that a disk has spoilt."""
    return *damaged(draw, as_yaml(grid, draw).encode()), Expect.EITHER


def nothing(draw: random.Random, grid: Grid) -> Spoilt:
    """A whole grid."""
    return grid, "whole", Expect.TAKEN


KEEPS = (0, 0.5, 1, 1.5, "0.5", "0", "20MB", "3tokens", "-3tokens", "NaN", "1e400", "", "5%", HUGE)
KINDS = (invalid, invalid, invalid, more, more, anything, anything, gone, text, bytes_of_it, eviction, nothing)


def make(draw: random.Random, place: Place) -> Case:
    """A grid with one thing wrong in it; what is right is run on one question."""
    grid = yaml.safe_load((place.pool / "grid.yaml").read_text())
    grid["limit"] = 1
    grid["tasks"], grid["arms"][0]["adapter"] = grid["tasks"][:1], grid["arms"][0]["adapter"][:1]
    content, what, expect = draw.choice(KINDS)(draw, grid)
    if not isinstance(content, bytes):
        content = as_yaml(content, draw).encode("utf-8", "surrogatepass")
    path = place.write("grid.yaml", content)
    if draw.random() < 0.05:
        what, expect = no_file(draw, path), Expect.REFUSED
    words = ["evaluate", "--config", "grid.yaml", "--out", "results"]
    if what.startswith("out"):
        words = words[:3]
    return Case(f"evaluate --config: {what}", words, expect, (".",) if len(words) == 3 else ("results",))
