"""Every way to spoil a value, a tree, bytes and a file; an independent reading says what must come of it."""

import codecs
import csv
import io
import json
import math
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import yaml

from tests.hostile.case import Expect, Spoilt

NAN, INFINITY, HUGE = float("nan"), float("inf"), 10**400
ABSENT, DEPTH, TRIES = object(), 64, 300
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


def changed(tree: Any, path: Way | str, value: Any) -> Any:
    """A copy with another value at a place, its groups made where they are absent."""
    path = tuple(path.split(".")) if isinstance(path, str) else path
    tree = band = deepcopy(tree)
    for key in path[:-1]:
        band = band.setdefault(key, {}) if isinstance(band, dict) else band[key]
    band[path[-1]] = value
    return tree


def mutated(draw: random.Random, tree: Any) -> tuple[Any, str]:
    path, other = draw.choices(list(paths_of(tree)), k=2)
    dotted = ".".join(map(str, path))
    kind = draw.choice(("value", "value", "value", "gone", "more", "nested", "swapped"))
    if kind == "gone":
        tree = deepcopy(tree)
        del at(tree, path[:-1])[path[-1]]
        return tree, f"{dotted} is gone"
    if kind == "more" and isinstance(at(tree, path[:-1]), dict):
        name = draw.choice(("unknown", "__class__", *NAMES))
        return changed(tree, (*path[:-1], name), at(tree, path)), f"{name!r} beside {dotted}"
    if kind == "nested":
        depth = draw.choice((1, 2, 70, 600, 3000))
        return changed(tree, path, nested(depth, draw.random() < 0.5)), f"{dotted} nested {depth} deep"
    value = deepcopy(at(tree, other)) if kind == "swapped" else draw.choice(ODD_VALUES)
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


def as_yaml(tree: Any) -> str:
    try:
        return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
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
    path.unlink()
    put(kind, path)
    return kind


def put(kind: str, path: Path) -> str:
    """Make something odd at a path where nothing is; the name by which it is to be called."""
    links = {"link to nothing": "nowhere", "round": path.name, "behind": path.name, "there": "back", "chain": "link0"}
    links |= {"zero": "/dev/zero", "random": "/dev/urandom"}
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        os.mknod(path, 0o140600)
    elif kind in links:
        path.symlink_to(links[kind])
    if kind == "there":
        path.with_name("back").symlink_to(path.name)
    for number in range(50 if kind == "chain" else 0):
        path.with_name(f"link{number}").symlink_to(f"link{number + 1}")
    return f"{path.name}/inner" if kind == "behind" else path.name


class NoDocument(Exception):
    """Bytes that are no document of their kind."""


def parsed_json(content: bytes) -> Any:
    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(found)) < len(found):
            raise NoDocument("a key twice")
        return dict(found)

    def constant(name: str) -> Any:
        raise NoDocument(name)

    try:
        return json.loads(content.decode("utf-8"), object_pairs_hook=pairs, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise NoDocument(str(error)) from None


def parsed_marked(content: bytes) -> Any:
    return parsed_json(content.removeprefix(codecs.BOM_UTF8))


def parsed_lines(content: bytes, parse: Callable[[bytes], Any] = parsed_json) -> list[Any]:
    return [parse(line) for line in content.split(b"\n") if line.strip()]


class _Loader(yaml.SafeLoader):
    """Refuses what stands twice."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> Any:
    keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
    if len({str(key) for key in keys}) < len(keys):
        raise NoDocument("a key twice")
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def parsed_yaml(content: bytes) -> Any:
    try:
        return yaml.load(content.decode("utf-8"), _Loader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError, OverflowError) as error:
        raise NoDocument(str(error)) from None


def parsed_text(content: bytes) -> list[str]:
    try:
        text = content.decode("utf-8-sig")
    except ValueError as error:
        raise NoDocument(str(error)) from None
    if "\0" in text:
        raise NoDocument("a NUL")
    return text.split("\n")


def parsed_csv(content: bytes) -> list[list[str]]:
    text = "\n".join(parsed_text(content))
    try:
        return [row for row in csv.reader(io.StringIO(text, newline=""), strict=True) if row]
    except csv.Error as error:
        raise NoDocument(str(error)) from None


def parsed_parquet(content: bytes) -> Any:
    try:
        file = pq.ParquetFile(io.BytesIO(content))
    except Exception as error:
        raise NoDocument(str(error)) from None
    try:
        table = file.read()
        return [table.to_pylist(), repr(table.schema.metadata), repr(file.metadata.metadata)]
    except Exception:  # in a column that perhaps nobody reads
        return None


class Notation(NamedTuple):
    parse: Callable[[bytes], Any]
    write: Callable[[Any], str] = written
    typed: bool = False  # whether a text may read as a value of another kind


JSON, MARKED = Notation(parsed_json), Notation(parsed_marked)
LINES = Notation(parsed_lines, lines)
MARKED_LINES = Notation(partial(parsed_lines, parse=parsed_marked), lines)  # each of several files may begin with one
YAML, TEXT = Notation(parsed_yaml, as_yaml, True), Notation(parsed_text)
CSV, PARQUET = Notation(parsed_csv), Notation(parsed_parquet)


def kind(value: Any, typed: bool = False) -> str:
    """The kind of a value; NaN and infinity are no numbers, a boolean is none either, nothing is of every kind."""
    if value is None or (typed and isinstance(value, str) and not isinstance(_read(value), str)):
        return "any"
    if isinstance(value, bool):
        return "switch"
    if isinstance(value, int | float):
        return "number" if abs(value) < 10**300 else "no number"
    return "group" if isinstance(value, dict) else "list" if isinstance(value, list) else "text"


def _read(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def matches(way: Way, patterns: str) -> bool:
    dotted = ".".join(str(part).replace(".", "_") for part in way)
    return any(fnmatchcase(dotted, each) and dotted.count(".") == each.count(".") for each in patterns.split())


def differences(before: Any, after: Any, way: Way = ()) -> Iterator[tuple[Way, Any, Any]]:
    """Every place where two trees differ; lists of other lengths differ as a whole."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in {**before, **after}:
            yield from differences(before.get(key, ABSENT), after.get(key, ABSENT), (*way, key))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from differences(one, other, (*way, index))
    elif type(before) is not type(after) or before != after:
        yield way, before, after


def plain(tree: Any) -> bool:
    """Whether a tree is one for a file: not too deep, every number finite, every text one that can be written."""
    level, depth = [tree], 0
    while level and depth <= DEPTH + 1:
        for each in level:
            if isinstance(each, float) and not math.isfinite(each):
                return False
            texts = [each] if isinstance(each, str) else list(each) if isinstance(each, dict) else []
            if any("\ud800" <= letter <= "\udfff" for text in texts if isinstance(text, str) for letter in text):
                return False
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level, depth = [below for group in inner for below in group], depth + 1
    return not level


Odd = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Document:
    """A kind of file. Places are dotted, several apart by spaces; ``*`` stands for any one part.

    One rule judges every change: a value of another kind and a key that nobody knows are wrong; of a value of the same
    kind, of nothing and of a key that is gone it says nothing, unless a table does. What it says nothing of is drawn
    anew.
    """

    odd: Odd = field(default_factory=dict)  # values that cannot stand at a place, whatever their kind
    loose: str = ""  # places that take several kinds
    open: str = ""  # places that may hold keys that nobody knows
    free: str = ""  # places, with all below, that nobody reads: whatever stands there, nothing changes
    needed: str = ""  # places without which it is no document
    only: str = ""  # places that are judged, and no others; all are where there are none
    ways: str = "odd odd changed bytes file whole"  # odd, changed places, bytes, no file, the whole; frequent ones more
    notation: Notation = JSON
    broken: Expect | None = Expect.REFUSED  # what must come of bytes that are no such document; None: nobody knows

    def right(self, before: Any, after: Any) -> Expect | None:
        """REFUSED for a wrong document, TAKEN for one that means the same, None where nobody knows."""
        if not plain(after):
            return Expect.REFUSED
        found = [self._change(*each) for each in differences(before, after)]
        if Expect.REFUSED in found:
            return Expect.REFUSED
        return None if None in found else Expect.TAKEN

    def _change(self, way: Way, before: Any, after: Any) -> Expect | None:
        if any(matches(way[: i + 1], self.free) for i in range(len(way))):
            return Expect.TAKEN
        if matches(way, self.loose) or (self.only and not matches(way, self.only)):
            return None
        if before is ABSENT:
            return None if matches(way, self.open) else Expect.REFUSED
        if after is ABSENT or after is None:
            return Expect.REFUSED if matches(way, self.needed) else None
        kinds = {kind(before), kind(after, self.notation.typed)}
        return Expect.REFUSED if len(kinds - {"any"}) == 2 else None

    def spoil(self, draw: random.Random, path: Path, ways: str = "") -> Spoilt:
        way = draw.choice((ways or self.ways).split())
        if way == "whole":
            return "whole", Expect.TAKEN
        if way == "file":
            return no_file(draw, path), Expect.REFUSED
        content, what, expect = self.spoilt(draw, path.read_bytes(), way)
        path.write_bytes(content)
        return what, expect

    def spoilt(self, draw: random.Random, content: bytes, way: str) -> tuple[bytes, str, Expect]:
        """Spoilt bytes of which the right answer is known, what was done, and the answer."""
        before, expect = self.notation.parse(content), None
        for _ in range(TRIES):
            if way == "bytes":
                after, what = damaged(draw, content)
                try:
                    expect = self.right(before, self.notation.parse(after))
                except NoDocument:
                    expect = self.broken
            else:
                tree, what = misplaced(draw, before, self.odd) if way == "odd" else mutated(draw, before)
                expect = Expect.REFUSED if way == "odd" else self.right(before, tree)
                after = self.notation.write(tree).encode("utf-8", "surrogatepass")
            if expect is not None:
                return after, what, expect
        raise AssertionError("nothing is known of this document")


def misplaced(draw: random.Random, tree: Any, odd: Odd) -> tuple[Any, str]:
    while True:
        dotted, values = draw.choice([(place, values) for places, values in odd.items() for place in places.split()])
        if (way := _found(draw, tree, dotted)) is not None:
            value = draw.choice(values)
            return changed(tree, way, value), f"{'.'.join(map(str, way))} is {shown(value)}"


def _found(draw: random.Random, tree: Any, dotted: str) -> Way | None:
    """The way to a place; one of them where a part is ``*``; None where something on the way is no group."""
    way: Way = ()
    for part in dotted.split("."):
        key: Any = part
        if isinstance(tree, list) and tree:
            key = draw.randrange(len(tree)) if part == "*" else int(part)
            tree = tree[key]
        elif isinstance(tree, dict):
            tree = tree.get(part, {})
        else:
            return None
        way = (*way, key)
    return way
