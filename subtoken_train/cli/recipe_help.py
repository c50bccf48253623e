"""Keys of a recipe in words, for ``fit --help`` and TAB: read from the schema that travels with the recipes, no torch.

``eval "$(register-python-argcomplete subtoken-train)"`` lets a shell offer commands, options, recipes' names and keys.
"""

import argparse
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import fields
from types import ModuleType
from typing import Any

from subtoken_train.cli.command_line import Parser
from subtoken_train.cli.recipe_source import RecipeSource, recipe_keys, shipped_schema
from subtoken_train.reducers import REDUCERS
from subtoken_train.resources import recipe_files


def keys_text(source: RecipeSource) -> str:
    """Return a line for each key that these recipes may hold; without recipes, for every key that any may hold."""
    schema, content = shipped_schema(), dict[str, Any]()
    if source.contents:
        content = {"model": {"reducer": {"name": source.reducer}}, "data": {source.data_kind: None}}
    keys = dict(recipe_keys(schema, content))
    if source.contents and source.reducer not in REDUCERS.builtin:  # another package's
        keys |= {f"model.reducer.{field.name}": str(field.type) for field in fields(REDUCERS.find(source.reducer))}
    width = max(map(len, keys))
    return "\n".join(f"  --{key:<{width}}  {words}" for key, words in keys.items())


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
                action.completer = _recipes


def _recipes(prefix: str, **_: object) -> list[str]:
    from argcomplete.completers import FilesCompleter

    names = [path.stem for path in recipe_files().values() if path.stem.startswith(prefix)]
    return [*names, *FilesCompleter(("yaml", "yml"))(prefix)]
