"""A disk without room, or a file that comes while a command works, in front of everything that is written."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

from tests.hostile.case import Case, Expect, Place
from tests.hostile.pool import LM, VLM, asked_model
from tests.hostile.recipes import TENSORS
from tests.hostile.references import content_of, made, same

ROOM = (0, 40, 2**30)
"""Bytes that a file may have: none, fewer than any of them takes, and as many as it likes."""


@cache
def asked(pool: Path) -> Any:
    """A model with a cache to save."""
    model = asked_model(pool, "lm")
    model.ask("Code polya quiet dragon. " * 9, [])
    return model


def commands(place: Place) -> dict[str, tuple[list[str], tuple[str, ...], tuple[str, ...]]]:
    """What writes: its words, what it writes, and what it may leave unfinished."""
    vlm, dev = str(place.pool / "adapters" / VLM), str(place.pool / "scenes/dev.json")
    one = ["--data", dev, "--limit", "1"]
    image, short = str(place.pool / "images/a.png"), ["--max-new-tokens", "1"]
    llama = str(place.pool / "backbones/tiny-llama")
    return {
        "export": (["export", vlm, "out"], ("out",), ()),
        "evaluate --out": (["evaluate", "--adapter", vlm, *one, *short, "--out", "out.json"], ("out.json",), ()),
        "evaluate --config": (["evaluate", "--config", str(place.pool / "grid.yaml"), "--out", "results"],
        ("results",), ("results",)),
        "report": (["report", str(place.pool / "results"), "--out", "tables"], ("tables",), ()),
        "calibrate": (["calibrate", "prefixkv", "--backbone", llama, "--out", "made.json", "--option", "samples=2",
        "--option", "context_length=300"], ("made.json",), ()),
        "diagnose": (["diagnose", "--adapter", vlm, *one, "--out", "seen"], ("seen",), ()),
        "data scenes": (["data", "scenes", "--out", "made", *("--train", "1", "--dev", "1", "--test", "1")], ("made",),
        ()),
        "init": (["init", "mine"], ("mine_subtoken",), ()),
        "generate --show": (["generate", "--adapter", vlm, "--image", image, "--prompt", "what ?", *short, "--show",
        "kept.png"], ("kept.png",), ()),
        "generate --prompts": (["generate", "--adapter", str(place.pool / "adapters" / LM), "--prompts", "asked.jsonl",
        "--output", "out.jsonl", *short], ("out.jsonl", "out.jsonl.records"), ("out.jsonl.records",)),
        "recipes copy": (["recipes", "copy", "tiny_lora_only", "mine.yaml"], ("mine.yaml",), ()),
        "data images": (["data", "images", "--file", dev, "--root", "mine", "--missing-list", "absent.txt"],
        (), ("absent.txt",)),
        "fit": (["fit", "--config", str(place.pool / f"{VLM}.yaml")], ("run",), ("run",)),
    }  # fmt: skip


def make(draw: random.Random, place: Place) -> Case:
    """A command, or the saving of a cache, on a disk that is full."""
    table = commands(place)
    name, room = draw.choice((*table, "cache.save", "cache.save")), draw.choice(ROOM)
    expect = Expect.TAKEN if room == 2**30 else Expect.REFUSED
    says = () if expect is Expect.TAKEN else ("too large", "no space", "full", "room")
    if name == "cache.save":
        path = place.work / "a.safetensors"
        if draw.random() < 0.5:  # an older one stays whole
            place.copy("caches/lm.safetensors", path.name)
        reference = made(lambda: content_of(place.pool / "caches/lm.safetensors", place.pool))
        return Case(
            f"{name} with {room} bytes", lambda: saved(place, path), expect, (path.name,),
            reference=reference, says=says, room=room,
        )  # fmt: skip
    words, writes, unfinished = table[name]
    place.copy("images/a.png", "mine/a.png")
    table_of_mine = "image,question,answer\na.png,list 0 .,none\n"
    table_of_mine += "".join(f"{i}.png,list {i} .,none\n" for i in range(3))
    files: dict[str, str | bytes] = {"asked.jsonl": '{"prompt": "what is this ?"}\n', "mine/q.csv": table_of_mine}
    picture = (place.pool / "images/a.png").read_bytes()
    files |= {f"mine/{number}.png": picture + bytes([number]) for number in range(3)}
    for other, content in files.items():
        place.write(other, content)
    if name == "data images":  # what is missing is an answer of its own
        expect, says = Expect.REFUSED, ()
    if len(writes) == 1 and draw.random() < 0.4:
        what, comes = f"{name}, and a file comes to its place", place.work / writes[0]
        return Case(what, words, Expect.REFUSED, writes_anyway=unfinished, comes=comes)
    compared = TENSORS if name == "fit" else writes
    reference = same(place, words, compared, dict(files))
    return Case(
        f"{name} with {room} bytes", words, expect, writes, unfinished, reference=reference, says=says, room=room
    )


def saved(place: Place, path: Path) -> str:
    """Save the cache; what the file holds."""
    asked(place.pool).cache.save(path, overwrite=True)
    return content_of(path, place.pool)
