"""Read recipes by a bounded reader and check what they may say, before anything is parsed or imported.

All of it works without torch. Types, and keys below the bands, are left to ``cli/recipe.py``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from subtoken_train.cli.command_line import FLAGS, Words, split_words
from subtoken_train.cli.trainer_parts import KINDS, SETTINGS, check_setting, named_parts
from subtoken_train.documents import InvalidYAML, parse_yaml
from subtoken_train.errors import first_names, refuse, shell_words
from subtoken_train.reducers import DEFAULT_REDUCER, split_settings
from subtoken_train.resources import named_recipe, recipe_text, resource
from subtoken_train.typed import Written, shown, unwritten

BANDS = ("model", "data", "trainer", "checkpoint", "evaluation", "early_stopping")
KEYS = (*BANDS, "seed_everything", "output_dir", "push_to_hub")
"""All that a recipe holds at its top; the flags stand in recipes that version 0.1 saved, as false."""
_OPTIONAL = ("evaluation", "early_stopping")
_MAX_TEXT = 4096
_COMMANDS = ("help", "h", "print_config")
_EXAMPLE = "tiny_fastv25_s16k4"


@dataclass(frozen=True)
class RecipeSource:
    """Recipes and options that passed: contents without flags, each option as the recipe that would say the same."""

    words: Words
    contents: tuple[dict[str, Any], ...]
    pieces: tuple[dict[str, Any], ...]
    reducer: str

    def data_keys(self) -> set[str]:
        """Return the keys of the recipes' ``data`` bands."""
        bands = [content.get("data") for content in self.contents]
        return {key for band in bands if isinstance(band, dict) for key in band}


def read_source(argv: list[str]) -> RecipeSource:
    """Read and check the recipes (``--config``) and options of a command line; a mistake is a worded ``ValueError``."""
    words = split_words(argv)
    if words.stray:
        is_recipe = words.stray[0].endswith((".yaml", ".yml"))
        hint = f"a recipe is passed as --config {words.stray[0]}" if is_recipe else "options start with --"
        raise ValueError(f"unexpected argument {words.stray[0]!r}; {hint}")
    contents = [_read_file(path) for path in words.configs]
    for content in contents:
        _check_content(content, "key")
    pieces = [_piece(key, text) for key, text in words.options]
    for piece in pieces:
        _check_content(piece, "option")
    named = [name for content in (*contents, *pieces) if isinstance(name := _reducer(content).get("name"), str)]
    reducer = named[-1] if named else DEFAULT_REDUCER
    return RecipeSource(words, tuple(_with_own(content, reducer) for content in contents), tuple(pieces), reducer)


def read_recipe(path: str | Path) -> dict[str, Any]:
    """Read a saved recipe without the flags that version 0.1 saved; ``ValueError`` if it holds no keys."""
    content = parse_yaml(recipe_text(Path(path)), str(path))
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no keys; a recipe has the bands model, data and trainer")
    kept = {key: value for key, value in content.items() if key not in FLAGS}
    return _with_own(kept, str(_reducer(kept).get("name", DEFAULT_REDUCER)))


def _reducer(content: dict[str, Any]) -> dict[str, Any]:
    band = content.get("model")
    group = band.get("reducer") if isinstance(band, dict) else None
    return group if isinstance(group, dict) else {}


def _with_own(content: dict[str, Any], reducer: str) -> dict[str, Any]:
    """Drop the other methods' defaults, which version 0.1 wrote into every recipe that it resolved."""
    group = _reducer(content)
    own, others = split_settings({**group, "name": reducer})
    kept = {key: value for key, value in group.items() if key in own or key in others}
    return content if kept == group else {**content, "model": {**content["model"], "reducer": kept}}


def _read_file(path: str) -> dict[str, Any]:
    content = parse_yaml(recipe_text(named_recipe(path)), path)
    if not isinstance(content, dict) or not content:
        raise ValueError(f"{path} holds no keys; a recipe has the bands model, data and trainer")
    instead = f"evaluate it: subtoken-train evaluate --config {shell_words(path)}"
    refuse(({"arms", "tasks"} <= content.keys(), f"{path} is a grid of arms and tasks, no recipe; {instead}"))
    for key, value in content.items():
        if key in FLAGS:
            where = f"that belongs on the command line: remove it there, and add --{key} if you mean it"
            refuse((value not in (False, None), f"{path} says {key}: {shown(value)}; {where}"))
        elif not isinstance(key, str) or key not in KEYS:
            raise ValueError(unknown_key("key", shown(key).strip("'"), [*KEYS, *known_keys()]))
        elif key in BANDS and not isinstance(value, dict) and (value is not None or key not in _OPTIONAL):
            raise ValueError(f"{key} is {shown(value)}; it must be a group of keys")
    return {key: value for key, value in content.items() if key not in FLAGS}


def _piece(key: str, text: str | None) -> dict[str, Any]:
    names = key.removesuffix("+").split(".")
    if key in _COMMANDS:
        return {}
    if names[-1] == "help":
        raise ValueError(f"--{key} is not available; 'subtoken-train recipes show {_EXAMPLE}' prints a complete recipe")
    if key == "allow-code":
        raise ValueError(f"--{key} is gone: a recipe names no classes; see docs/recipe_safety.md for your own ones")
    if names[0] == "trainer" and names[1:2] and names[1] in KINDS and (len(names) > 2 or key.endswith("+")):
        raise ValueError(f"--{key} is not read; write the whole: --trainer.{names[1]}='{{NAME: {{SETTING: VALUE}}}}'")
    if names[0] not in (*KEYS, *FLAGS) or key.endswith("+"):
        raise ValueError(unknown_key("option", key, known_keys(), prefix="--"))
    if text is None:
        raise ValueError(f"--{key} needs a value")
    value: Any = Written(text)
    with suppress(InvalidYAML):
        content = parse_yaml(text, f"--{key}")
        value = content if isinstance(content, dict | list) else value
    for name in reversed(names):
        value = {name: value}
    return dict(value)


def _check_content(content: dict[str, Any], kind: str) -> None:
    _check_texts(content, "")
    band = content.get("trainer")
    for name, value in band.items() if isinstance(band, dict) else ():
        if name not in SETTINGS:
            dashes = "--" if kind == "option" else ""
            raise ValueError(unknown_key(kind, f"trainer.{name}", known_keys(), prefix=dashes))
        check_setting(name, unwritten(value))
        if name in KINDS:
            named_parts(name, unwritten(value))


def _check_texts(content: Any, key: str) -> None:
    if isinstance(content, str) and len(content) > _MAX_TEXT:
        raise ValueError(f"{key} is a text of {len(content):,} characters; the limit is {_MAX_TEXT:,}")
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for name, value in items:
        _check_texts(value, f"{key}.{name}".strip("."))


def known_keys() -> list[str]:
    """List the keys that a misspelt one is compared with: ours, the trainer's, those of a complete recipe."""
    recipe = yaml.safe_load(resource(f"recipes/{_EXAMPLE}.yaml").read_text(encoding="utf-8"))
    return sorted({*KEYS, *FLAGS, *(f"trainer.{key}" for key in SETTINGS), *_leaves(recipe)} - {*BANDS})


def _leaves(content: dict[str, Any], prefix: str = "") -> Iterable[str]:
    for key, value in content.items():
        yield from _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [prefix + key]


def unknown_key(kind: str, key: str, keys: Iterable[str], prefix: str = "") -> str:
    """Return the message for a key that no recipe has, with the nearest one, or those beside it."""
    keys = list(keys)
    head = f"unknown {kind} {prefix + key!r}."
    if key.endswith("class_path"):
        return f"{head} A recipe names no class; docs/recipe_safety.md lists what it may name"
    if near := _nearest(key, keys):
        return f"{head} Did you mean {prefix + near!r}?"
    group = key.rpartition(".")[0]
    if beside := _below(group, keys):
        return f"{head} Allowed in {group}: {first_names(beside)}"
    if "." in group:  # no group either
        return unknown_key(kind, group, keys, prefix)
    return f"{head} 'subtoken-train recipes show tiny_fastv25_s16k4' prints a complete recipe"


def _below(group: str, keys: list[str]) -> list[str]:
    within = f"{group}."
    return [*dict.fromkeys(name.removeprefix(within).partition(".")[0] for name in keys if name.startswith(within))]


def _nearest(key: str, keys: list[str]) -> str | None:
    """Find the key most likely meant: a similar name in the group, a similar group, or a similar name below it."""
    group, _, leaf = key.rpartition(".")
    beside = [name for name in keys if name.rpartition(".")[0] == group]
    names = {name.rpartition(".")[2]: name for name in beside}
    if near := difflib.get_close_matches(leaf, names, n=1, cutoff=0.6):
        return names[near[0]]
    if group and (near := difflib.get_close_matches(leaf, _below(group, keys), n=1, cutoff=0.8)):
        return f"{group}.{near[0]}"
    if not beside and (near := difflib.get_close_matches(key, keys, n=1, cutoff=0.8)):
        return near[0]
    within = f"{group}." if group and beside else ""
    below = {name.rpartition(".")[2]: name for name in keys if name.startswith(within)}
    near = difflib.get_close_matches(leaf.replace("-", "_"), below, n=1, cutoff=0.8)
    return below[near[0]] if near else None
