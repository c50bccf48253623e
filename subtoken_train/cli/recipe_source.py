"""Read recipes by a bounded reader and check what they may say, before anything is parsed or imported.

All of it works without torch. Types, and keys below the bands, are left to ``cli/recipe.py``.
"""

import difflib
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from subtoken_train.cli.command_line import FLAGS, Words, split_words
from subtoken_train.cli.trainer_parts import KINDS, SETTINGS, check_setting, named_parts
from subtoken_train.documents import InvalidYAML, parse_yaml
from subtoken_train.errors import first_names, in_a_recipe, instead, refuse, shell_words
from subtoken_train.reducers import DEFAULT_REDUCER, split_settings
from subtoken_train.resources import named_recipe, recipe_text, resource
from subtoken_train.typed import Written, shown, text_numbers, unwritten

BANDS = ("model", "data", "trainer", "checkpoint", "evaluation", "early_stopping")
KEYS = (*BANDS, "seed_everything", "output_dir", "push_to_hub")
"""All that a recipe holds at its top; the flags stand in recipes that version 0.1 saved, as false."""
_OPTIONAL = ("evaluation", "early_stopping")
_MAX_TEXT = 4096
_OF_COMMANDS = ("config", "print_config", "anchor", "offline", "machine", "count")  # options that are no keys


@dataclass(frozen=True)
class RecipeSource:
    """Recipes and options that passed: contents without flags, each option as the recipe that would say the same."""

    words: Words
    contents: tuple[dict[str, Any], ...]
    pieces: tuple[dict[str, Any], ...]
    reducer: str

    @property
    def data_kind(self) -> str:
        """The key that tells the kind of its data: a corpus (``train``), recall (``num_facts``), or records."""
        keys = {key for content in self.contents if isinstance(band := content.get("data"), dict) for key in band}
        return next((key for key in ("train", "num_facts") if key in keys), "train_file")


@in_a_recipe
def read_source(argv: list[str]) -> RecipeSource:
    """Read and check the recipes (``--config``) and options of a command line; a mistake is a worded ``ValueError``."""
    words = split_words(argv)
    contents = [_read_file(path) for path in words.configs]
    for content in contents:
        _check_content(content, "key")
    pieces = [_piece(key, text) for key, text in words.options]
    for piece in pieces:
        _check_content(piece, "option")
    named = [name for content in (*contents, *pieces) if isinstance(name := reducer_group(content).get("name"), str)]
    reducer = named[-1] if named else DEFAULT_REDUCER
    source = RecipeSource(words, tuple(_with_own(content, reducer) for content in contents), tuple(pieces), reducer)
    _check_keys(source)
    return source


def _check_keys(source: RecipeSource) -> None:
    """Refuse a key that no recipe with this reducer and kind of data has, and a text in the place of a number."""
    chosen = {"model": {"reducer": {"name": source.reducer}}, "data": {source.data_kind: None}}
    keys = {**dict.fromkeys(FLAGS, ""), **dict(recipe_keys(shipped_schema(), chosen))}
    if not any(key.startswith("model.reducer.") for key in keys):  # another package's, which no shipped schema knows
        keys["model.reducer"] = ""
    for word, dashes, given in (("key", "", source.contents), ("option", "--", source.pieces)):
        for key, value in (each for content in given for each in _leaves(content, keys)):
            if not any(each == key or each.startswith(f"{key}.") for each in keys) and not key.startswith("trainer."):
                raise ValueError(unknown_key(word, key, sorted(keys), prefix=dashes))
            kind = keys.get(key, "").partition(" (")[0].removesuffix(" or null")
            if kind in _NUMBERS and isinstance(unwritten(value), str) and not [*text_numbers(value)]:
                raise ValueError(f"{key} is {shown(value)}; it must be {_NUMBERS[kind]}")


_NUMBERS = {"whole number": "a whole number", "number": "a number"}


def _leaves(content: dict[str, Any], keys: Iterable[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and any(each.startswith(f"{key}.") for each in keys):
            yield from _leaves(value, keys, f"{key}.")
        else:
            yield key, value


def read_recipe(path: str | Path) -> dict[str, Any]:
    """Read a saved recipe without the flags that version 0.1 saved; ``ValueError`` if it holds no keys."""
    content = parse_yaml(recipe_text(Path(path)), str(path))
    refuse((not isinstance(content, dict), f"{path} has no keys; a recipe has the groups model, data and trainer"))
    kept = {key: value for key, value in content.items() if key not in FLAGS}
    return _with_own(kept, str(reducer_group(kept).get("name", DEFAULT_REDUCER)))


def reducer_group(content: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a recipe's reducer; empty where it names none."""
    band = content.get("model")
    group = band.get("reducer") if isinstance(band, dict) else None
    return group if isinstance(group, dict) else {}


def _with_own(content: dict[str, Any], reducer: str) -> dict[str, Any]:
    """Drop the other methods' defaults, which version 0.1 wrote into every recipe that it resolved."""
    group = reducer_group(content)
    own, others = split_settings({**group, "name": reducer})
    kept = {key: value for key, value in group.items() if key in own or key in others}
    return content if kept == group else {**content, "model": {**content["model"], "reducer": kept}}


def _read_file(path: str) -> dict[str, Any]:
    content = parse_yaml(recipe_text(named_recipe(path)), path)
    if not isinstance(content, dict) or not content:
        raise ValueError(f"{path} has no keys; a recipe has the groups model, data and trainer")
    instead = f"evaluate it: subtoken-train evaluate --config {shell_words(path)}"
    refuse(({"arms", "tasks"} <= content.keys(), f"{path} is a grid of arms and tasks, no recipe; {instead}"))
    for key, value in content.items():
        if key in FLAGS:
            where = f"that belongs on the command line: remove it there, and add --{key} if you mean it"
            refuse((value not in (False, None), f"{path} says {key}: {shown(value)}; {where}"))
        elif not isinstance(key, str) or key not in KEYS:
            raise ValueError(unknown_key("key", shown(key).strip("'"), [*KEYS, *_known_keys()]))
        elif key in BANDS and not isinstance(value, dict) and (value is not None or key not in _OPTIONAL):
            raise ValueError(f"{key} is {shown(value)}; it must be a group of keys")
    return {key: value for key, value in content.items() if key not in FLAGS}


def _piece(key: str, text: str | None) -> dict[str, Any]:
    names = key.removesuffix("+").split(".")
    if key in ("help", "h", "print_config"):
        return {}
    if names[0] == "trainer" and names[1:2] and names[1] in KINDS and (len(names) > 2 or key.endswith("+")):
        raise ValueError(f"--{key} is not read; write the whole: --trainer.{names[1]}='{{NAME: {{SETTING: VALUE}}}}'")
    if names[0] not in (*KEYS, *FLAGS) or key.endswith("+"):
        raise ValueError(unknown_key("option", key, [*_known_keys(), *_OF_COMMANDS], prefix="--"))
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
            raise ValueError(unknown_key(kind, f"trainer.{name}", _known_keys(), prefix=dashes))
        check_setting(name, unwritten(value))
        if name in KINDS:
            named_parts(name, unwritten(value))


def _check_texts(content: Any, key: str) -> None:
    if isinstance(content, str) and len(content) > _MAX_TEXT:
        raise ValueError(f"{key} is a text of {len(content):,} characters; the limit is {_MAX_TEXT:,}")
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for name, value in items:
        _check_texts(value, f"{key}.{name}".strip("."))


def _known_keys() -> list[str]:
    """List the keys that a misspelt one is compared with: the flags, and all that the shipped schema has."""
    return [*FLAGS, *dict(recipe_keys(shipped_schema(), {}))]


def unknown_key(kind: str, key: str, keys: Iterable[str], prefix: str = "") -> str:
    """Return the message for a key that no recipe has, with the nearest one, or those beside it."""
    parts = [each.split(".") for each in keys]
    names = [*dict.fromkeys(".".join(each[:count]) for each in parts for count in range(1, len(each) + 1))]
    head, (group, _, leaf) = f"unknown {kind} {prefix + key!r}.", key.rpartition(".")
    if words := instead("key", key):
        return f"unknown {kind} {prefix + key!r}; {words}"
    if leaf == "class_path":
        return f"{head} A recipe names no class; docs/recipe_safety.md lists what it may name"
    beside = [name for name in names if name.rpartition(".")[0] == group]
    within = [name for name in names if name.startswith(f"{group}.")] if group and beside else names
    for pool, alike in ((beside, 0.6), (within, 0.8)):
        leaves = {name.rpartition(".")[2]: name for name in pool}
        if near := difflib.get_close_matches(leaf.replace("-", "_"), leaves, n=1, cutoff=alike):
            return f"{head} Did you mean {prefix + leaves[near[0]]!r}?"
    if group and beside:
        return f"{head} Allowed in {group}: {first_names(sorted(name.rpartition('.')[2] for name in beside))}"
    return unknown_key(kind, group, [".".join(each) for each in parts], prefix) if "." in group else head


_WORDS = {"integer": "whole number", "boolean": "true or false", "string": "text", "array": "list", "object": "group"}


def shipped_schema(kind: str = "recipe") -> dict[str, Any]:
    """Return the JSON schema of a recipe, or of a ``grid``, as it ships: with built-in names alone."""
    return dict(json.loads(resource(f"recipes/{kind}.schema.json").read_text(encoding="utf-8")))


def recipe_keys(schema: dict[str, Any], content: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield every dotted key with its type and default; of alternatives those that have the keys of ``content``."""
    for name, each in schema["properties"].items():
        key, given = f"{prefix}{name}", content.get(name) or {}
        groups = [part for part in each.get("anyOf", [each]) if "properties" in part and "maxProperties" not in part]
        for properties in (group["properties"] for group in groups):
            chosen = given.get("name")
            named = chosen is None or chosen in properties["name"].get("enum", [chosen])
            if given.keys() <= properties.keys() and named:
                yield from recipe_keys({"properties": properties}, given, f"{key}.")
        if not groups:
            default = f" ({json.dumps(each['default'])})" if "default" in each else ""
            yield key, f"{_type_words(each)}{default}"


def _type_words(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_type_words, schema["anyOf"])))
    if "enum" in schema:
        return ", ".join("null" if each is None else str(each) for each in schema["enum"])
    kinds = schema.get("type", "any")
    return " or ".join({_WORDS.get(kind, kind): 1 for kind in ([kinds] if isinstance(kinds, str) else kinds)})
