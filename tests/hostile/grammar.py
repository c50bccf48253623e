"""What a kind of file is, what may stand in it, and every way to spoil one: an independent reading knows the answer."""

import codecs
import csv
import io
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import yaml

from tests.hostile.case import Expect, Spoilt
from tests.hostile.values import Way, as_yaml, changed, damaged, lines, mutated, no_file, shown, without, written

ABSENT = object()
DEPTH = 64
TRIES = 300


class NoDocument(Exception):
    """Bytes that are no document of their kind."""


@dataclass(frozen=True)
class Format:
    """What a kind of document allows beside a valid original; places are dotted, ``*`` stands for any one part.

    What is not named here must be as it was in kind: a value of another kind, a key that is gone and one that nobody
    knows are wrong. A value of the same kind is not judged unless its place says what it may be.

    Attributes:
        free: places, with all below, that nobody reads: whatever stands there, nothing changes.
        optional: places that may be gone, and then nothing changes.
        more: groups that may hold keys that nobody reads.
        legal: places, several apart by spaces, that allow other values, and which; what is not legal is wrong.
        exact: places whose value nothing else replaces.
        only: places that are judged; all others are not, None: all are.
        unsaid: places of which nothing is known where they are, or were, gone or null.
        typed: whether a text that reads as a value of another kind (``"1"``) may stand for it, as in YAML.
    """

    free: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    legal: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)
    exact: tuple[str, ...] = ()
    only: tuple[str, ...] | None = None
    unsaid: tuple[str, ...] = ()
    typed: bool = False

    def right(self, before: Any, after: Any) -> Expect | None:
        """REFUSED for a wrong document, TAKEN for one that means the same, None where this does not know."""
        if too_deep(after) or not plain(after):
            return Expect.REFUSED
        found = [self._change(*each) for each in differences(before, after)]
        if Expect.REFUSED in found:
            return Expect.REFUSED
        return None if None in found else Expect.TAKEN

    def _change(self, way: Way, before: Any, after: Any) -> Expect | None:
        if any(_at(way[: i + 1], self.free) for i in range(len(way))):
            return Expect.TAKEN
        if self._unknown(way, before, after):
            return None
        if before is ABSENT or after is ABSENT:
            place, right = (way[:-1], self.more) if before is ABSENT else (way, self.optional)
            return Expect.TAKEN if _at(place, right) else Expect.REFUSED
        allowed = [legal for places, legal in self.legal.items() if _at(way, tuple(places.split()))]
        if allowed:
            return None if any(each(after) for each in allowed) else Expect.REFUSED
        return Expect.REFUSED if kind(before) != kind(after) or _at(way, self.exact) else None

    def _unknown(self, way: Way, before: Any, after: Any) -> bool:
        if self.only is not None and not _at(way, self.only):
            return True
        if (before in (ABSENT, None) or after in (ABSENT, None)) and _at(way, self.unsaid):
            return True
        text = self.typed and isinstance(after, str) and before is not ABSENT and kind(before) != "text"
        return text and not isinstance(_read(after), str)


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def text_or_none(value: Any) -> bool:
    return isinstance(value, str | None)


def anything(value: Any) -> bool:
    return True


def count(value: Any) -> bool:
    return type(value) is int and value >= 0


def kind(value: Any) -> str:
    """The kind of a value; NaN and infinity are no numbers, a boolean is none either."""
    if isinstance(value, bool) or value is None:
        return str(type(value))
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


def _at(way: Way, patterns: tuple[str, ...]) -> bool:
    dotted = ".".join(str(part).replace(".", "_") for part in way)
    return any(fnmatchcase(dotted, pattern) and dotted.count(".") == pattern.count(".") for pattern in patterns)


def differences(before: Any, after: Any, way: Way = ()) -> Iterator[tuple[Way, Any, Any]]:
    """Every place where two trees differ; lists of other lengths differ as a whole."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            yield from differences(before.get(key, ABSENT), after.get(key, ABSENT), (*way, key))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from differences(one, other, (*way, index))
    elif type(before) is not type(after) or before != after:
        yield way, before, after


def too_deep(tree: Any, depth: int = DEPTH) -> bool:
    level = [tree]
    for _ in range(depth + 1):
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [below for group in inner for below in group if isinstance(below, dict | list)]
        if not level:
            return False
    return True


def plain(tree: Any) -> bool:
    level = [tree]
    while level:
        each = level.pop()
        if isinstance(each, str):
            try:
                each.encode()
            except UnicodeEncodeError:
                return False
        elif isinstance(each, dict):
            level += [*each, *each.values()]
        elif isinstance(each, list):
            level += each
        elif isinstance(each, float) and not math.isfinite(each):
            return False
    return True


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


def parsed_lines(content: bytes) -> list[Any]:
    return [parsed_json(line) for line in content.split(b"\n") if line.strip()]


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
        table = pq.read_table(io.BytesIO(content))
        return [table.to_pylist(), repr(table.schema.metadata)]
    except Exception as error:
        raise NoDocument(str(error)) from None


class Notation(NamedTuple):
    parse: Callable[[bytes], Any]
    write: Callable[[Any, random.Random], str] = lambda tree, draw: written(tree)


JSON, MARKED, LINES = (
    Notation(parsed_json), Notation(parsed_marked), Notation(parsed_lines, lambda rows, _: lines(rows)),
)  # fmt: skip
YAML, TEXT, CSV, PARQUET = Notation(parsed_yaml, as_yaml), *map(Notation, (parsed_text, parsed_csv, parsed_parquet))


def change(draw: random.Random, tree: Any, form: Format) -> tuple[Any, str, Expect]:
    """A tree with one change of which the right answer is known, what it is, and the answer."""
    for _ in range(TRIES):
        after, what = mutated(draw, tree)
        if (expect := form.right(tree, after)) is not None:
            return after, what, expect
    raise AssertionError("nothing is known of this document")


def damage(
    draw: random.Random, content: bytes, parse: Callable[[bytes], Any], form: Format, broken: Expect = Expect.REFUSED
) -> tuple[bytes, str, Expect]:
    """Spoilt bytes of which the right answer is known, what was done, and the answer; ``broken``: where it is none."""
    before = parse(content)
    for _ in range(TRIES):
        spoilt, what = damaged(draw, content)
        try:
            expect = form.right(before, parse(spoilt))
        except NoDocument:
            expect = broken
        if expect is not None:
            return spoilt, what, expect
    raise AssertionError("nothing is known of this document")


Odd = Mapping[str, tuple[Any, ...]]
"""By dotted places, several apart by spaces, ``*`` for any one index: values that cannot be there."""


def ways_to(draw: random.Random, tree: Any, dotted: str) -> Way | None:
    """The keys that lead to a dotted place; None where something that is no group lies on the way."""
    way: Way = ()
    for part in dotted.split("."):
        if isinstance(tree, list):
            key: Any = draw.randrange(len(tree)) if part == "*" else int(part)
            tree = tree[key]
        elif isinstance(tree, dict):
            key, tree = part, tree.get(part, {})
        else:
            return None
        way = (*way, key)
    return way


def misplaced(draw: random.Random, tree: Any, odd: Odd) -> tuple[Any, str, Expect]:
    while True:
        dotted, values = draw.choice([(place, values) for places, values in odd.items() for place in places.split()])
        if (way := ways_to(draw, tree, dotted)) is not None:
            value = draw.choice(values)
            return changed(tree, way, value), f"{'.'.join(map(str, way))} is {shown(value)}", Expect.REFUSED


@dataclass(frozen=True)
class Document:
    """A kind of file: its notation, what is known of its fields, what cannot stand in them, and how it is spoilt.

    Attributes:
        ways: of spoiling, the frequent ones several times: ``odd`` and ``changed`` fields, a key that is ``gone``,
            spoilt ``bytes``, no ``file`` at all, and the ``whole`` file.
        broken: what must come of bytes that are no such document.
    """

    form: Format = Format()
    odd: Odd = field(default_factory=dict)
    ways: str = "odd odd changed bytes file whole"
    notation: Notation = JSON
    broken: Expect = Expect.REFUSED

    def spoil(self, draw: random.Random, path: Path, ways: str = "") -> Spoilt:
        way = draw.choice((ways or self.ways).split())
        if way == "whole":
            return "whole", Expect.TAKEN
        if way == "file":
            return no_file(draw, path), Expect.REFUSED
        content = path.read_bytes()
        if way == "bytes":
            content, what, expect = damage(draw, content, self.notation.parse, self.form, self.broken)
            path.write_bytes(content)
            return what, expect
        tree = self.notation.parse(content)
        if way == "gone":
            key = draw.choice(list(tree))
            tree, what, expect = without(tree, (key,)), f"{key} is gone", Expect.REFUSED
        elif way == "odd":
            tree, what, expect = misplaced(draw, tree, self.odd)
        else:
            tree, what, expect = change(draw, tree, self.form)
        path.write_bytes(self.notation.write(tree, draw).encode("utf-8", "surrogatepass"))
        return what, expect
