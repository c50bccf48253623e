"""Entry point of ``subtoken-train``: finds the command, parses its arguments, guards its errors."""

from __future__ import annotations

import importlib
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence

from subtoken_train import __version__
from subtoken_train.cli.command_line import Parser, check_options
from subtoken_train.cli.registry import COMMANDS
from subtoken_train.cli.terminal import PROGRAM, guarded
from subtoken_train.errors import unknown_name

OVERVIEW_OPTIONS = ("--help", "--version")


def overview() -> str:
    """The text of ``subtoken-train --help``."""
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items())
    return (
        f"usage: {PROGRAM} COMMAND ...\n\n"
        "Sub-token routing for KV-cache compression: train, run and compare value-group routers.\n\n"
        f"commands:\n{rows}\n\n"
        f"'{PROGRAM} COMMAND --help' explains a command; '{PROGRAM} --version' prints the version."
    )


def run_command(name: str, argv: Sequence[str]) -> int:
    """Import the command's module, parse ``argv`` for it unless it is raw, and run it."""
    if name not in COMMANDS:
        raise unknown_name("command", name, COMMANDS)
    command = COMMANDS[name]
    module = importlib.import_module(command.module)
    if command.raw:
        return int(module.run_raw(list(argv)))
    parser = Parser(prog=f"{PROGRAM} {name}", description=module.HELP, formatter_class=RawDescriptionHelpFormatter)
    module.add_arguments(parser)
    check_options(parser, argv)
    return int(module.run(parser.parse_args(argv)))


def dispatch(argv: Sequence[str]) -> int:
    """Answer ``--help`` and ``--version``, hand everything else to its command."""
    first, *rest = argv or ["--help"]
    if first in ("-h", "--help"):
        print(overview())
    elif first == "--version":
        print(f"{PROGRAM} {__version__}")
    elif first.startswith("-"):
        raise unknown_name("option", first, OVERVIEW_OPTIONS)
    else:
        return run_command(first, rest)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: arguments without the program's name; None takes them from ``sys.argv``.
    """
    arguments = sys.argv[1:] if argv is None else argv
    return guarded(lambda: dispatch(arguments))
