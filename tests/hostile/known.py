"""Says of any change to a valid document whether it is right, wrong, or without a meaning: an independent reading."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from tests.hostile.case import Expect
from tests.hostile.values import changed, damaged, mutated, shown, written

ABSENT = object()
DEPTH = 64
Way = tuple[Any, ...]
Legal = Callable[[Any], bool]


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
        legal: places that allow other values, and which; what is not legal is wrong.
        exact: places whose value nothing else replaces.
        only: places that are judged; all others are not, None: all are.
        unsaid: places of which nothing is known where they are, or were, gone or null.
        typed: whether a text that reads as a value of another kind (``"1"``) may stand for it, as in YAML.
    """

    free: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    legal: Mapping[str, Legal] = field(default_factory=dict)
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
        allowed = [self.legal[pattern] for pattern in self.legal if _at(way, (pattern,))]
        if allowed:
            return None if any(each(after) for each in allowed) else Expect.REFUSED
        return Expect.REFUSED if kind(before) != kind(after) or _at(way, self.exact) else None

    def _unknown(self, way: Way, before: Any, after: Any) -> bool:
        """Whether nothing is known of what stands there."""
        if self.only is not None and not _at(way, self.only):
            return True
        if (before in (ABSENT, None) or after in (ABSENT, None)) and _at(way, self.unsaid):
            return True
        text = self.typed and isinstance(after, str) and before is not ABSENT and kind(before) != "text"
        return text and not isinstance(_read(after), str)


def kind(value: Any) -> str:
    """The kind of a value; NaN and infinity are no numbers, a boolean is none either."""
    if isinstance(value, bool) or value is None:
        return str(type(value))
    if isinstance(value, int | float):
        return "number" if abs(value) < 10**300 else "no number"
    return "group" if isinstance(value, dict) else "list" if isinstance(value, list) else "text"


def _read(text: str) -> Any:
    """What a text is to YAML, or to Python's numbers."""
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
    """Whether lists and groups are nested deeper than any of our documents is."""
    level = [tree]
    for _ in range(depth + 1):
        level = [
            below
            for each in level
            if isinstance(each, dict | list)
            for below in (each.values() if isinstance(each, dict) else each)
            if isinstance(below, dict | list)
        ]
        if not level:
            return False
    return True


def plain(tree: Any) -> bool:
    """Whether every text is made of whole characters, and every number is one."""
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
    """A JSON document, by the letter of the standard."""

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


def parsed_lines(content: bytes) -> list[Any]:
    """JSON documents, one a line, empty lines left out."""
    return [parsed_json(line) for line in content.split(b"\n") if line.strip()]


def parsed_yaml(content: bytes) -> Any:
    """A YAML document of plain values."""

    class Loader(yaml.SafeLoader):
        """Refuses what stands twice."""

    def mapping(loader: Loader, node: yaml.MappingNode) -> Any:
        keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
        if len({str(key) for key in keys}) < len(keys):
            raise NoDocument("a key twice")
        return loader.construct_mapping(node, deep=True)

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    try:
        return yaml.load(content.decode("utf-8"), Loader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError, OverflowError) as error:
        raise NoDocument(str(error)) from None


TRIES = 300


def change(draw: random.Random, tree: Any, form: Format) -> tuple[Any, str, Expect]:
    """A tree with one change of which the right answer is known, what it is, and the answer."""
    for _ in range(TRIES):
        after, what = mutated(draw, tree)
        if (expect := form.right(tree, after)) is not None:
            return after, what, expect
    raise AssertionError("nothing is known of this document")


def damage(
    draw: random.Random,
    content: bytes,
    parse: Callable[[bytes], Any],
    form: Format,
    broken: Expect = Expect.REFUSED,
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


def misplaced(draw: random.Random, tree: Any, table: Mapping[Any, tuple[Any, ...]]) -> tuple[Any, str, Expect]:
    """A tree with a value that cannot be at one of a table's places (tuples, or dotted), what it is, and the answer."""
    key = draw.choice(list(table))
    way, value = tuple(key.split(".")) if isinstance(key, str) else key, draw.choice(table[key])
    return changed(tree, way, value), f"{'.'.join(map(str, way))} is {shown(value)}", Expect.REFUSED


def change_file(draw: random.Random, path: Path, form: Format) -> tuple[str, Expect]:
    """``change`` a JSON document in its place."""
    content, what, expect = change(draw, json.loads(path.read_text()), form)
    path.write_text(written(content))
    return what, expect


def damage_file(
    draw: random.Random, path: Path, form: Format, parse: Callable[[bytes], Any] = parsed_json
) -> tuple[str, Expect]:
    """``damage`` a document in its place."""
    spoilt, what, expect = damage(draw, path.read_bytes(), parse, form)
    path.write_bytes(spoilt)
    return what, expect


def damage_or_change(draw: random.Random, path: Path, form: Format, kind: str) -> tuple[str, Expect]:
    """``change`` a JSON document in its place for the kind ``mutated``, ``damage`` it for any other."""
    return change_file(draw, path, form) if kind == "mutated" else damage_file(draw, path, form)
