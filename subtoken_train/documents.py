"""Read foreign JSON and YAML as data, bounded in size, depth and expansion.

Whatever the bytes: a plain value (dict, list, str, number, bool, None), or one ``ValueError`` that names the place.
"""

import json
import os
import re
import stat
import unicodedata
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from subtoken_train.errors import refuse, system_words

MAX_BYTES = 2**26
MAX_DEPTH = 64
MAX_NODES = 100_000  # of a YAML document, with its aliases written out
_NOT_PLAIN = [f"tag:yaml.org,2002:{name}" for name in ("omap", "pairs", "set", "binary")]
"""Tags of YAML whose values are tuples, sets and bytes; who looks through plain values would not see into them."""


class InvalidYAML(ValueError):
    """The text is no YAML document; one that exceeds a bound raises a plain ``ValueError``."""


def read_text(path: str | Path, max_bytes: int = MAX_BYTES) -> str:
    """Read a regular file as UTF-8."""
    size = check_regular(path)
    refuse((size > max_bytes, f"{path} has {size:,} bytes; at most {max_bytes:,} are read"))
    return decoded(Path(path).read_bytes(), str(path))


def check_regular(path: str | Path) -> int:
    """Return the size of a regular file in bytes; opening a pipe would wait for a writer."""
    try:
        status = Path(path).stat()
    except OSError as error:
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError
        raise kind(system_words(error)) from None
    refuse((not stat.S_ISREG(status.st_mode), f"{path} is not a regular file; name a file, no folder, pipe or device"))
    return status.st_size


def real_path(path: str | Path) -> Path:
    """Return a path without links and dots; a loop of links stays as it is, where ``Path.resolve`` raises."""
    return Path(os.path.realpath(path))


def decoded(content: bytes, place: str) -> str:
    """Decode bytes as UTF-8; the ``ValueError`` names the first invalid byte."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{place} is not UTF-8 (byte {error.start}); save it as UTF-8") from None


def read_json(path: str | Path, max_bytes: int = MAX_BYTES) -> Any:
    """Read a JSON file."""
    return parse_json(read_text(path, max_bytes), str(path))


def parse_json(text: str | bytes, place: str, *, constants: bool = False) -> Any:
    """Parse a JSON text; ``constants``: whether NaN and Infinity, which are no JSON, are numbers."""
    text = text if isinstance(text, str) else decoded(text, place)
    try:
        value = (LENIENT_JSON if constants else STRICT_JSON).decode(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text.strip() else ""
        raise ValueError(f"{place}: invalid JSON ({error.msg}, {line}column {error.colno})") from None
    except RecursionError:
        raise _too_deep(place) from None
    except ValueError as error:
        raise ValueError(f"{place}: invalid JSON ({error})") from None
    if isinstance(value, dict | list) and text.count("[") + text.count("{") > MAX_DEPTH:
        _check_depth(value, place)
    if "\\ud" in text or "\\uD" in text:
        check_characters(value, place)
    return value


def check_characters(value: Any, place: str) -> None:
    """Raise ``ValueError`` if a JSON value holds what no tokenizer takes: half of a surrogate pair, endless blanks."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{place} holds half of a surrogate pair (\\ud800-\\udfff), no character") from None
    if len(text) > _BLANKS and re.search(rf"\s{{{_BLANKS}}}", re.sub(r"\\[nrtf]", " ", text)):
        raise ValueError(f"{place} holds {_BLANKS:,} blanks in a row, at which tokenizers break down; take them out")


_BLANKS = 1_000_000


def text_problem(text: str) -> str | None:
    """Return why a text cannot be used (it holds a NUL, or nothing that can be seen), or None."""
    if "\0" in text:
        return "holds a NUL character"
    if any(map(_is_visible, text)):
        return None
    return "holds no visible character" if text.strip() else "is empty"


@cache
def _is_visible(character: str) -> bool:
    return unicodedata.category(character) not in _UNSEEN_KINDS and character not in _UNSEEN


_UNSEEN_KINDS = ("Cc", "Cf", "Cs", "Zs", "Zl", "Zp")
_SELECTORS = (*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))
_UNSEEN = {*"\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0", *map(chr, _SELECTORS)}
"""Fillers and variation selectors, which have other kinds."""


def read_yaml(path: str | Path, max_bytes: int = 2**20) -> Any:
    """Read a YAML file."""
    return parse_yaml(read_text(path, max_bytes), str(path))


def parse_yaml(text: str, place: str) -> Any:
    """Parse one YAML document; tags of its own are refused."""
    try:
        loader = _PlainLoader(text, place)
        if (node := loader.get_single_node()) is None:
            return None
        _count(node, {}, place)
        try:
            return loader.construct_document(node)
        except (TypeError, OverflowError, ValueError) as error:  # a list as a key, a date that there is not
            raise InvalidYAML(f"{place}: invalid YAML ({error})") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = "a list or a group as a key" if error.problem == "found unhashable key" else error.problem
        raise InvalidYAML(f"{place}{where}: invalid YAML ({problem})") from None
    except yaml.YAMLError as error:
        raise InvalidYAML(f"{place}: invalid YAML ({' '.join(str(error).split())[:200]})") from None


class _PlainLoader(yaml.SafeLoader):
    def __init__(self, text: str, place: str) -> None:
        super().__init__(text)
        self.place, self.depth = place, 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        tag: str | None = getattr(self.peek_event(), "tag", None)  # type: ignore[no-untyped-call]
        if tag in _NOT_PLAIN:
            raise ValueError(f"{self.place}: the tag !!{tag.rpartition(':')[2]} is not read; leave it out")
        nests = self.check_event(yaml.CollectionStartEvent)
        self.depth += nests
        if self.depth > MAX_DEPTH:
            raise _too_deep(self.place)
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= nests
        return node


def check_file_name(name: str, place: str) -> str:
    """Return a name that is to become a file's or folder's; refuse one that could lead elsewhere."""
    odd = not name.strip(". ") or set(name) & set("/\\") or not name.isprintable()
    if odd or len(name.encode("utf-8", "surrogatepass")) > 200:
        limits = "at most 200 bytes without /, \\ or control characters"
        raise ValueError(f"{place} is {name[:60]!r}, which also names a file: {limits}")
    return name


def _count(node: yaml.Node, sizes: dict[int, int], place: str) -> int:
    """Count the nodes below one, aliases written out; 0 in ``sizes`` marks a node that is being counted."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if (known := sizes.get(id(node))) is not None:
        refuse((known == 0, f"{place}, line {node.start_mark.line + 1}: invalid YAML (an alias that holds itself)"))
        return known
    sizes[id(node)], total, children = 0, 1, list(node.value)
    if isinstance(node, yaml.MappingNode):
        _check_keys([key for key, _ in node.value], place)
        children = [each for pair in node.value for each in pair]
    for child in children:
        total += _count(child, sizes, place)
        if total > MAX_NODES:
            raise ValueError(f"{place}: invalid YAML (more than {MAX_NODES:,} values once its aliases are written out)")
    sizes[id(node)] = total
    return total


def _check_keys(keys: Iterable[yaml.Node], place: str) -> None:
    seen: set[tuple[str, str]] = set()
    for key in keys:
        if not isinstance(key, yaml.ScalarNode) or key.tag.endswith(":merge"):
            continue
        if (key.tag, key.value) in seen:
            raise ValueError(f"{place}, line {key.start_mark.line + 1}: key {key.value[:80]!r} appears twice")
        seen.add((key.tag, key.value))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {twice[:80]!r} appears twice in one object")
    return made


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


STRICT_JSON = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)
LENIENT_JSON = json.JSONDecoder(object_pairs_hook=_unique)  # NaN and Infinity, which are no JSON, are numbers


def _check_depth(value: Any, place: str, left: int = MAX_DEPTH) -> None:
    if left == 0:
        raise _too_deep(place)
    for below in value.values() if isinstance(value, dict) else value:
        if isinstance(below, dict | list):
            _check_depth(below, place, left - 1)


def _too_deep(place: str) -> ValueError:
    return ValueError(f"{place} is nested deeper than {MAX_DEPTH} levels")
