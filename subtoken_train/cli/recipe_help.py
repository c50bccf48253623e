"""Keys of a recipe in words, for ``fit --help``: read from the schema that travels with the recipes, without torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from subtoken_train.cli.recipe_source import RecipeSource
from subtoken_train.reducers import REDUCERS
from subtoken_train.resources import resource

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
        for group in groups:
            if _holds(group["properties"], given):
                yield from recipe_keys(group, given, f"{key}.")
        if not groups:
            default = f" ({json.dumps(each['default'])})" if "default" in each else ""
            yield key, f"{_type_words(each)}{default}"


def _holds(properties: dict[str, Any], content: dict[str, Any]) -> bool:
    name = content.get("name")
    return content.keys() <= properties.keys() and (name is None or name in properties["name"].get("enum", [name]))


def _type_words(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_type_words, schema["anyOf"])))
    if "enum" in schema:
        return ", ".join("null" if each is None else str(each) for each in schema["enum"])
    kinds = schema.get("type", "any")
    return " or ".join(_WORDS.get(kind, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds))
