"""Recipes that are names: a base recipe and one line of ``recipes/names.csv``, put together as text.

A line holds ``name,base,settings,summary``. Settings are written as on the command line, ``KEY=VALUE`` with dots and
blanks between them, and ``KEY-`` leaves a key out. The text keeps the base's comments, except those of the lines that
a setting replaces. Where the base names its own run, adapter or anchor, the text names the new ones.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TABLE = "names.csv"
_ARM = re.compile(r"[a-z0-9]+_[a-z]+(?:_[a-z]+)*\d+(?:p\d+)?")
_ANCHOR = "_anchor"


@dataclass(frozen=True)
class NamedRecipe:
    """One line of the table.

    Attributes:
        name: of the recipe, without suffix.
        base: name of the recipe that it is made from.
        settings: what differs, ``KEY=VALUE`` or ``KEY-``, with blanks between them.
        summary: its first line.
    """

    name: str
    base: str
    settings: str
    summary: str

    def text(self, base_text: str) -> str:
        """Return the whole YAML."""
        lines = _renamed(base_text, self.base, self.name).split("\n")[1:]
        made = f"# Made from recipes/{self.base}.yaml by its line of recipes/{TABLE}."
        start = next(index for index, line in enumerate(lines) if not line.startswith("#"))
        lines = [f"# {self.summary}", *lines[:start], made, *lines[start:]]
        for setting in self.settings.split():
            if setting.endswith("-"):
                keys = setting[:-1].split(".")
                start, end = _block(lines, keys) or (0, 0)
                del lines[start:end]
            else:
                key, _, value = setting.partition("=")
                _put(lines, key.split("."), value)
        return "\n".join(lines)


@cache
def read_names(folder: Path) -> dict[str, NamedRecipe]:
    """Return the lines of a folder's table by name; nothing where there is no table."""
    table = folder / TABLE
    if not table.is_file():
        return {}
    with table.open(encoding="utf-8", newline="") as file:
        return {row["name"]: NamedRecipe(**row) for row in csv.DictReader(file)}


def _renamed(text: str, base: str, name: str) -> str:
    """Replace the base's name, its arm's (model, reducer, keep ratio) and that of the arm that it is the anchor of."""
    old, new = _ARM.match(base), _ARM.match(name)
    if old and new:
        text = re.sub(rf"(?<!\w){old[0]}(?!\d|p\d)", new[0], text)
        base = new[0] + base[old.end() :]
    text = re.sub(rf"(?<!\w){base}(?!\w)", name, text)
    if base.endswith(_ANCHOR) and name.endswith(_ANCHOR):
        text = re.sub(rf"(?<!\w){base.removesuffix(_ANCHOR)}(?!\w)", name.removesuffix(_ANCHOR), text)
    return text


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _block(lines: list[str], keys: list[str]) -> tuple[int, int] | None:
    """Return the lines of a key, from its own to the last that is indented deeper; None where the key is missing."""
    start, end = 0, len(lines)
    for depth, key in enumerate(keys):
        found = (i for i in range(start, end) if re.match(rf" {{{2 * depth}}}{re.escape(key)}:(\s|$)", lines[i]))
        index = next(found, None)
        if index is None:
            return None
        last = index
        for i in range(index + 1, end):
            if lines[i].strip() and _indent(lines[i]) <= 2 * depth:
                break
            last = i if lines[i].strip() else last
        start, end = index + (depth < len(keys) - 1), last + 1
    return start, end


def _put(lines: list[str], keys: list[str], value: str) -> None:
    """Set a key; one that is missing is added at the end of its group, with the groups on the way."""
    line = f"{' ' * (2 * len(keys) - 2)}{keys[-1]}: {value}".rstrip()
    if (place := _block(lines, keys)) is not None:
        lines[place[0] : place[1]] = [line]
        return
    if _block(lines, keys[:-1]) is None:
        _put(lines, keys[:-1], "")
    place = _block(lines, keys[:-1])
    assert place is not None
    start, end = place
    if end == start + 1:  # a group that was null
        lines[start] = lines[start].partition(":")[0] + ":"
    lines.insert(end, line)
