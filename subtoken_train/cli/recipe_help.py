"""Keys of a recipe in words, for ``fit --help`` and TAB: read from the schema that travels with the recipes, no torch.

``eval "$(register-python-argcomplete subtoken-train)"`` lets a shell offer commands, options, recipes' names and keys.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

from subtoken_train.cli.command_line import Parser
from subtoken_train.cli.recipe_source import RecipeSource
from subtoken_train.reducers import REDUCERS
from subtoken_train.resources import recipe_files, resource

_WORDS = {"integer": "whole number", "boolean": "true or false", "string": "text", "array": "list", "object": "group"}


def shipped_schema(kind: str = "recipe") -> dict[str, Any]:
    """Return the JSON schema of a recipe, or of a ``grid``, as it ships: with built-in names alone."""
    schema: dict[str, Any] = json.loads(resource(f"recipes/{kind}.schema.json").read_text(encoding="utf-8"))
    return schema


def keys_text(source: RecipeSource) -> str:
    """Return a line for each key that these recipes may hold; without recipes, for every key that any may hold."""
    schema, content = shipped_schema(), dict[str, Any]()
    if source.contents:
        content = {"model": {"reducer": {"name": source.reducer}}, "data": dict.fromkeys(source.data_keys())}
        if source.reducer not in REDUCERS.builtin:
            from subtoken_train.cli.schemas import recipe_schema

            schema = recipe_schema()
    keys = dict(recipe_keys(schema, content))
    width = max(map(len, keys))
    return "\n".join(f"  --{key:<{width}}  {words}" for key, words in keys.items())


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
    return " or ".join(_WORDS.get(kind, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds))


def offer(parser: Parser, names: Iterable[str], module_of: Callable[[str], ModuleType]) -> None:
    """Answer the shell and leave; of the commands the one that is typed is imported."""
    import argcomplete

    actions, typed = parser.add_subparsers(), os.environ.get("COMP_LINE", "").split()[1:2]
    for name in names:
        module = module_of(name) if [name] == typed else None
        command = actions.add_parser(name, add_help=module is None or not hasattr(module, "run_raw"))
        if module is not None:
            _fill(command, module)
    argcomplete.autocomplete(parser)


def _fill(parser: argparse.ArgumentParser, module: ModuleType) -> None:
    if hasattr(module, "add_arguments"):
        module.add_arguments(parser)
    else:
        options = re.findall(r"(?<![\w-])--[a-z][\w-]*", module.HELP)
        for option in dict.fromkeys((*options, *(f"--{key}" for key, _ in recipe_keys(shipped_schema(), {})))):
            if option not in parser._option_string_actions:
                parser.add_argument(option)
    subparsers = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    for each in (parser, *(below for action in subparsers for below in action.choices.values())):
        for action in each._actions:
            if action.dest in ("config", "name"):
                action.completer = _recipes  # type: ignore[attr-defined]


def _recipes(prefix: str, **_: object) -> list[str]:
    from argcomplete.completers import FilesCompleter

    names = [path.stem for path in recipe_files().values() if path.stem.startswith(prefix)]
    return [*names, *FilesCompleter(("yaml", "yml"))(prefix)]
