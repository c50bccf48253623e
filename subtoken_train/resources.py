"""Files that travel with the project: recipes, small data, embedded checkpoints; in a wheel below ``_bundled``.

Most recipes are names alone: a base recipe and one line of ``recipes/names.csv`` (``name,base,settings,summary``), put
together as text. Settings are ``KEY=VALUE`` with blanks between, ``KEY-`` leaves a key out; the base's comments stay,
except on lines that a setting replaces, and the base's own name, adapter and anchor become the new ones.
"""

import csv
import json
import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from subtoken_train.documents import read_text

_PACKAGE = Path(__file__).resolve().parent
TABLE = "names.csv"
_ARM = re.compile(r"[a-z0-9]+_[a-z]+(?:_[a-z]+)*\d+(?:p\d+)?")
_ANCHOR = "_anchor"


def resource_root() -> Path:
    """Return the folder that holds ``recipes/``, ``data/`` and ``checkpoints/``."""
    bundled = _PACKAGE / "_bundled"
    return bundled if bundled.is_dir() else _PACKAGE.parent


def resource(relative: str) -> Path:
    """Return the path of a shipped file, e.g. ``data/digits/digits.npz``."""
    if not (path := resource_root() / relative).exists():
        raise FileNotFoundError(f"{relative} is missing from this installation (looked in {resource_root()})")
    return path


@cache
def published_models() -> dict[str, Any]:
    """Return the table of published models: their shapes, by Hub id, as the parts of configurations that they are."""
    return dict(json.loads(read_text(_PACKAGE / "published_models.json")))


def recipe_files() -> dict[str, Path]:
    """Return every shipped recipe, overlay and grid by ``FOLDER/NAME``, sorted; the folder of a run is its model."""
    folder = resource("recipes")
    names = {path.stem: path for path in folder.glob("*.yaml")}
    names |= {name: folder / f"{name}.yaml" for name in read_names(folder)}
    found = {f"{name.partition('_')[0]}/{name}": path for name, path in names.items()}
    found |= {path.relative_to(folder).with_suffix("").as_posix(): path for path in folder.glob("*/*.yaml")}
    return dict(sorted(found.items()))


def first_comment(path: Path) -> str:
    """Return a recipe's first line of comment, which says what it is."""
    comments = (line.lstrip("# ").rstrip() for line in recipe_text(path).splitlines() if line.startswith("#"))
    return next(comments, "")


def is_grid(text: str) -> bool:
    """Return True if a file's text has arms and tasks for ``evaluate``, where a recipe has a model."""
    return all(re.search(rf"^{key}:", text, re.MULTILINE) for key in ("arms", "tasks"))


def with_schema(text: str) -> str:
    """Return a recipe's or grid's text for any folder: its line for editors names the schema of this installation."""
    named = re.search(r"^# yaml-language-server: \$schema=(.*?(\w+\.schema\.json))$", text, re.MULTILINE)
    return text if named is None else text.replace(named[1], resource(f"recipes/{named[2]}").as_uri(), 1)


def recipe_text(path: Path, max_bytes: int = 2**20) -> str:
    """Return the text of a recipe's file, or of a shipped name: its base with the settings of its line."""
    folder = resource_root() / "recipes"
    row = None if path.exists() or path.parent.resolve() != folder.resolve() else read_names(folder).get(path.stem)
    if row is not None:
        return row.text(read_text(folder / f"{row.base}.yaml", max_bytes))
    return read_text(path, max_bytes)


def find_recipe(given: str | Path) -> Path | None:
    """Return the file that a user means: one that exists, else a shipped recipe; None if the path leads nowhere.

    A shipped one is written ``NAME`` or ``FOLDER/NAME``, alone or below any folder ``recipes``, ``.yaml`` or not.
    """
    if (path := Path(given)).is_dir():
        return shipped_recipe(given) or path
    return path if path.exists() else shipped_recipe(given)


def named_recipe(given: str | Path, kind: str = "recipe") -> Path:
    """Return the file that a user means, or raise ``ValueError`` with the nearest name."""
    if (path := find_recipe(given)) is not None:
        return path
    near = get_close_matches(Path(given).stem, [shipped.stem for shipped in recipe_files().values()], n=1, cutoff=0.5)
    hint = f" Did you mean {near[0] + '.yaml'!r}?" if near else ""
    raise ValueError(f"{kind} {given} is not a file.{hint} 'subtoken-train recipes ls' lists the shipped ones")


def shipped_recipe(given: str | Path) -> Path | None:
    """Return the shipped recipe of this spelling, whatever lies at that path, or None."""
    parts = Path(str(given).removesuffix(".yaml")).parts
    below = parts[len(parts) - parts[::-1].index("recipes") :] if "recipes" in parts else parts
    found = [path for name, path in recipe_files().items() if below in ((path.stem,), tuple(name.split("/")))]
    return found[0] if len(found) == 1 else None


@dataclass(frozen=True)
class NamedRecipe:
    """One line of the table of names."""

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
                start, end = _block(lines, setting[:-1].split(".")) or (0, 0)
                del lines[start:end]
            else:
                key, _, value = setting.partition("=")
                _put(lines, key.split("."), value)
        return "\n".join(lines)


@cache
def read_names(folder: Path) -> dict[str, NamedRecipe]:
    """Return the lines of a folder's table by name; nothing where there is no table."""
    if not (table := folder / TABLE).is_file():
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


def _block(lines: list[str], keys: list[str]) -> tuple[int, int] | None:
    """Return the lines of a key, from its own to the last that is indented deeper; None where the key is missing."""
    start, end = 0, len(lines)
    for depth, key in enumerate(keys):
        found = (i for i in range(start, end) if re.match(rf" {{{2 * depth}}}{re.escape(key)}:(\s|$)", lines[i]))
        if (index := next(found, None)) is None:
            return None
        last = index
        for i in range(index + 1, end):
            if lines[i].strip() and len(lines[i]) - len(lines[i].lstrip(" ")) <= 2 * depth:
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
