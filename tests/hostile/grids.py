"""Grids of ``evaluate --config``."""

from __future__ import annotations

import random
from typing import Any

import yaml

from hostile.case import Case, Expect, Place
from hostile.recipe_files import TEXTS
from hostile.values import as_yaml, HUGE, NAN, changed, damaged, mutated, no_file, shown, without

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
    "keep_ratio": (0, -1, 2, "x", NAN, []),
    "reducer": ("nope", 5, []),
    "selector": ("nope", 5, []),
    "protocol": ("nope", 5, []),
    "kv_dtype": ("nope", 5, []),
    "scope": ("nope", 5, []),
    "name": (5, "../x", "a/b", "", ".", "..", []),
    "seed": ("x", 1.5, []),
    "unknown": (1,),
    "reducer_options": (5, {"layer": -1}, {"unknown": 1}, []),
    "eviction_options": (5, {"x": 1}, []),
}


def make(draw: random.Random, place: Place) -> Case:
    """A grid with one thing wrong in it; what is right in it is run on two questions."""
    grid = yaml.safe_load((place.pool / "grid.yaml").read_text())
    grid["limit"] = 1
    grid["tasks"], grid["arms"][0]["adapter"] = grid["tasks"][:1], grid["arms"][0]["adapter"][:1]
    kind = draw.choice(
        ("invalid",) * 3
        + ("more",) * 2
        + ("mutated", "mutated", "gone", "text", "damage", "file", "eviction", "control")
    )
    expect, content = Expect.REFUSED, None
    if kind == "invalid":
        key = draw.choice(list(INVALID))
        value = draw.choice(INVALID[key])
        grid, what = changed(grid, key, value), f"{'.'.join(map(str, key))} is {shown(value)}"
    elif kind == "more":
        key = draw.choice(list(MORE))
        value = draw.choice(MORE[key])
        grid, what = changed(grid, ("arms", 0, key), value), f"arms.0.{key} is {shown(value)}"
    elif kind == "gone":
        key = draw.choice(("tasks", "arms", "out"))
        grid, what = without(grid, (key,)), f"{key} is gone"
    elif kind == "mutated":
        grid, what = mutated(draw, grid)
        expect = Expect.EITHER
    elif kind == "eviction":
        settings = {
            "eviction": draw.choice(("snapkv", "knorm", "streaming_llm", "random", "kvcompose")),
            "eviction_keep": draw.choice(
                (0, 0.5, 1, 1.5, "0.5", "0", "20MB", "3tokens", "-3tokens", "NaN", "1e400", "", "5%", HUGE)
            ),
            "scope": draw.choice(("all", "context", "nope", None)),
        }
        grid["arms"][0] |= settings
        what, expect = f"{settings['eviction']} {shown(settings['eviction_keep'])} {settings['scope']}", Expect.EITHER
    elif kind == "text":
        what = draw.choice(list(TEXTS))
        content = TEXTS[what].encode()
    else:
        what = "whole"
        expect = Expect.TAKEN if kind == "control" else Expect.EITHER
    if content is None:
        content = as_yaml(grid, draw).encode("utf-8", "surrogatepass")
    if kind == "damage":
        content, what = damaged(draw, content)
    path = place.write("grid.yaml", content)
    if kind == "file":
        what, expect = no_file(draw, path), Expect.REFUSED
    words = ["evaluate", "--config", "grid.yaml", "--out", "results"]
    if kind in ("invalid", "mutated") and what.startswith("out"):
        words = words[:3]
    return Case(f"evaluate --config: {what}", words, expect, (".",) if len(words) == 3 else ("results",))
