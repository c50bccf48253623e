"""An argparse parser whose mistakes are one short ``ValueError`` that names the nearest valid option or choice."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NoReturn

from subtoken_train.errors import unknown_name


class Parser(argparse.ArgumentParser):
    """``argparse.ArgumentParser`` without usage dumps and without abbreviated options."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})

    def error(self, message: str) -> NoReturn:
        """Raise ``ValueError`` instead of printing the usage and exiting."""
        raise ValueError(f"{message} (see '{self.prog} --help')")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise unknown_name(action.dest, value, map(str, action.choices))


def option_names(parser: argparse.ArgumentParser) -> set[str]:
    """The option strings of a parser and of its sub-commands."""
    names: set[str] = set()
    for action in parser._actions:
        names.update(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            names.update(*map(option_names, action.choices.values()))
    return names


def check_options(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Raise a worded ``ValueError`` at the first ``--option`` that the parser does not have.

    Runs before parsing, because argparse names a missing required option before it names a misspelt one.
    """
    known = option_names(parser)
    for token in takewhile(lambda token: token != "--", argv):
        name = token.split("=", 1)[0]
        if name.startswith("--") and name not in known and " " not in name:
            raise unknown_name("option", name, (option for option in known if option.startswith("--")))
