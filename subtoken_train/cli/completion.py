"""Offers of a shell behind TAB: commands, their options, recipes' names and keys; ``argcomplete`` talks to the shell.

``eval "$(register-python-argcomplete subtoken-train)"`` switches it on. Nothing heavy is imported.
"""

from __future__ import annotations

import argparse
import os
import re
from types import ModuleType

from subtoken_train.cli.command_line import Parser
from subtoken_train.cli.recipe_help import recipe_keys, shipped_schema
from subtoken_train.resources import recipe_files


def offer(parser: Parser, modules: dict[str, ModuleType | None]) -> None:
    """Answer the shell and leave; ``modules``: the commands, of which the one that is typed is imported."""
    import argcomplete

    actions = parser.add_subparsers()
    for name, module in modules.items():
        command = actions.add_parser(name, add_help=module is None or not hasattr(module, "run_raw"))
        if module is not None:
            _fill(command, module)
    argcomplete.autocomplete(parser)


def typed_command() -> str:
    """Return the first word behind the program's name on the line that the shell asks about."""
    words = os.environ.get("COMP_LINE", "").split()
    return words[1] if len(words) > 1 else ""


def _fill(parser: argparse.ArgumentParser, module: ModuleType) -> None:
    if hasattr(module, "add_arguments"):
        module.add_arguments(parser)
    else:
        options = dict.fromkeys(re.findall(r"(?<![\w-])--[a-z][\w-]*", module.HELP))
        for option in (*options, *(f"--{key}" for key, _ in recipe_keys(shipped_schema(), {}))):
            if option not in parser._option_string_actions:
                parser.add_argument(option)
    for each in (parser, *_below(parser)):
        for action in each._actions:
            if action.dest in ("config", "name"):
                action.completer = _recipes  # type: ignore[attr-defined]


def _below(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [each for action in found for each in action.choices.values()]


def _recipes(prefix: str, **_: object) -> list[str]:
    from argcomplete.completers import FilesCompleter

    names = [path.stem for path in recipe_files().values() if path.stem.startswith(prefix)]
    return [*names, *FilesCompleter(("yaml", "yml"))(prefix)]
