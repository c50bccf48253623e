"""Values that do not belong where they are put, and damage to bytes and whole files."""

import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

NAN, INFINITY = float("nan"), float("inf")
HUGE = 10**400
Way = tuple[Any, ...]
ODD_NUMBERS: tuple[Any, ...] = (
    0, -1, 1, 2, -(2**63), 2**63, 2**31, 10**12, HUGE, -0.0, 0.5, 1e308, 1e-320, NAN, INFINITY, -INFINITY,
)  # fmt: skip
NAMES = (
    "", " ", ".", "..", "../beside/notes.txt", "../../etc", "/etc/passwd", "a/b", "a\\b", "x" * 5000, "\x00", "a\nb",
    "\x1b[31mred", "[red]x[/red]", "[/bold]", "[link=http://x]y[/link]", "=1+1", "+1", "-1", "@sum", "\u202egnp",
    "\ud800", "\ufeffname", "~", "$HOME", "`id`", "$(touch CANARY)", "{0.__class__}", "%s%n", "NaN", "null", "None",
    "con", "a" * 300, "\N{GRINNING FACE}", "<script>", "--help",
)  # fmt: skip
PLAIN = tuple(name for name in NAMES if name.strip() and name.isprintable())  # names that may stand wherever a text may
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, [], {}, [[]], [None], {"": None}, {"a": {"b": {}}}, [1, "a", None], "text", *NAMES, *ODD_NUMBERS,
)  # fmt: skip


def paths_of(tree: Any, start: Way = ()) -> Iterator[Way]:
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield (*start, key)
        yield from paths_of(value, (*start, key))


def at(tree: Any, path: Way) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def changed(tree: Any, path: Way, value: Any) -> Any:
    """A copy with another value at a place, its groups made where they are absent."""
    tree = band = deepcopy(tree)
    for key in path[:-1]:
        band = band.setdefault(key, {}) if isinstance(band, dict) else band[key]
    band[path[-1]] = value
    return tree


def without(tree: Any, path: Way) -> Any:
    tree = deepcopy(tree)
    del at(tree, path[:-1])[path[-1]]
    return tree


def mutated(draw: random.Random, tree: Any) -> tuple[Any, str]:
    path = draw.choice(list(paths_of(tree)))
    dotted = ".".join(map(str, path))
    kind = draw.choice(("value", "value", "value", "gone", "more", "nested", "swapped"))
    if kind == "gone":
        return without(tree, path), f"{dotted} is gone"
    if kind == "more" and isinstance(at(tree, path[:-1]), dict):
        name = draw.choice(("unknown", "__class__", "", *NAMES))
        return changed(tree, (*path[:-1], name), at(tree, path)), f"{name!r} beside {dotted}"
    if kind == "nested":
        depth = draw.choice((1, 2, 70, 600, 3000))
        return changed(tree, path, nested(depth, draw.random() < 0.5)), f"{dotted} nested {depth} deep"
    if kind == "swapped":
        other = draw.choice(list(paths_of(tree)))
        return changed(tree, path, deepcopy(at(tree, other))), f"{dotted} holds what {'.'.join(map(str, other))} holds"
    value = draw.choice(ODD_VALUES)
    return changed(tree, path, value), f"{dotted} is {shown(value)}"


def nested(depth: int, lists: bool) -> Any:
    tree: Any = 1
    for _ in range(depth):
        tree = [tree] if lists else {"a": tree}
    return tree


def shown(value: Any) -> str:
    text = f"a number of {len(str(value))} digits" if isinstance(value, int) and abs(value) > 10**30 else repr(value)
    return text if len(text) < 60 else f"{text[:57]}..."


def written(tree: Any) -> str:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        return json.dumps(tree)
    finally:
        sys.setrecursionlimit(limit)


def lines(rows: Any) -> str:
    return "".join(written(row) + "\n" for row in rows) if isinstance(rows, list) else written(rows) + "\n"


def as_yaml(tree: Any, draw: random.Random) -> str:
    try:
        return yaml.safe_dump(tree, sort_keys=False, allow_unicode=draw.random() < 0.5)
    except RecursionError:
        return written(tree)


def _flipped(draw: random.Random, content: bytes, place: int) -> bytes:
    spoilt = bytearray(content or b"x")
    for _ in range(draw.choice((1, 3, 30))):
        spoilt[draw.randrange(len(spoilt))] ^= 1 << draw.randrange(8)
    return bytes(spoilt)


NOTHING = (b"", b"\n", b" ", b"\0", b"null", b"[]", b"{}", b"0", b'""')
DAMAGE: dict[str, Callable[[random.Random, bytes, int], bytes]] = {
    "cut": lambda draw, content, place: content[:place], "bits flipped": _flipped, "bits flipped again": _flipped,
    "zeros": lambda draw, content, place: content[:place] + b"\0" * 64 + content[place + 64 :],
    "twice": lambda draw, content, place: content + content,
    "a byte-order mark": lambda draw, content, place: b"\xef\xbb\xbf" + content,
    "UTF-16": lambda draw, content, place: content.decode("latin-1").encode("utf-16"),
    "no UTF-8": lambda draw, content, place: content[:place] + b"\xe9\xff" + content[place:],
    "next to nothing": lambda draw, content, place: draw.choice(NOTHING),
    "noise": lambda draw, content, place: content[:place] + draw.randbytes(40) + content[place:],
    "control characters": lambda draw, content, place: content[:place] + b"\x1b]0;x\x07\x08" + content[place:],
    "CRLF": lambda draw, content, place: content.replace(b"\n", b"\r\n"),
}  # fmt: skip


def damaged(draw: random.Random, content: bytes) -> tuple[bytes, str]:
    kind, place = draw.choice(list(DAMAGE)), draw.randrange(max(1, len(content)))
    return DAMAGE[kind](draw, content, place), f"{kind} at {place} of {len(content)} bytes"


ROUND = ("round", "there", "behind", "chain")
"""A link to itself, to one that leads back, a path behind one, fifty links in a row."""
FILE_KINDS = ("folder", "pipe", "link to nothing", "round", "zero", "random", "absent", "socket")


def no_file(draw: random.Random, path: Path) -> str:
    kind = draw.choice(FILE_KINDS)
    if path.is_dir() and not path.is_symlink():
        path.rename(path.with_name(f"{path.name}-away"))
    else:
        path.unlink(missing_ok=True)
    put(kind, path)
    return kind


def put(kind: str, path: Path) -> str:
    """Make something odd at a path where nothing is; the name by which it is to be called."""
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link to nothing":
        path.symlink_to("nowhere")
    elif kind in ("round", "behind"):
        path.symlink_to(path.name)
    elif kind == "there":
        path.symlink_to("back")
        path.with_name("back").symlink_to(path.name)
    elif kind == "chain":
        for number in range(50):
            path.with_name(f"link{number}").symlink_to(f"link{number + 1}")
        path.symlink_to("link0")
    elif kind in ("zero", "random"):
        path.symlink_to("/dev/zero" if kind == "zero" else "/dev/urandom")
    elif kind == "socket":
        os.mknod(path, 0o140600)
    return f"{path.name}/inner" if kind == "behind" else path.name
