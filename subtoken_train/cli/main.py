"""Entry point of ``subtoken-train``: finds the command, parses its arguments, guards its errors.

A new command costs its file and one line here. Its module exposes ``HELP`` (the text above its options),
``add_arguments(parser)`` and ``run(args) -> int``; a raw command parses its own arguments and exposes
``run_raw(argv) -> int`` instead. Modules are imported when their command is called, never for the list.
"""

from __future__ import annotations

import importlib
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import dataclass

from subtoken_train import __version__
from subtoken_train.cli.command_line import Parser, check_options
from subtoken_train.cli.terminal import PROGRAM, guarded
from subtoken_train.errors import unknown_name


@dataclass(frozen=True)
class Command:
    """One row of the command list.

    Attributes:
        summary: one line for ``subtoken-train --help``.
        module: where the command lives.
        raw: whether the module takes the argument list unparsed.
    """

    summary: str
    module: str
    raw: bool = False


COMMANDS = {
    "fit": Command("train LoRA and routers from a recipe", "subtoken_train.cli.fit", raw=True),
    "check": Command("what a recipe trains and costs, before it runs", "subtoken_train.cli.check", raw=True),
    "preview": Command("training samples as the loss sees them", "subtoken_train.cli.preview", raw=True),
    "evaluate": Command("score an adapter, or a backbone, on a data file", "subtoken_train.cli.evaluate"),
    "report": Command("tables, curves and one HTML page from results", "subtoken_train.cli.report"),
    "generate": Command("answer one prompt from a compressed cache", "subtoken_train.cli.generate"),
    "diagnose": Command("what an adapter's routers do with their budget", "subtoken_train.cli.diagnose"),
    "export": Command("adapter folder or merged weights from a run, and the Hub", "subtoken_train.cli.export"),
    "data": Command("make a data set, or check that one is complete", "subtoken_train.cli.data"),
    "sweep": Command("train a grid of overrides of a recipe", "subtoken_train.cli.sweep"),
    "recipes": Command("list, show or copy the shipped recipes", "subtoken_train.cli.recipes"),
    "budget": Command("what a keep ratio and S/K groups cost, and the matched anchor", "subtoken_train.cli.budget"),
    "env": Command("versions and hardware, for bug reports", "subtoken_train.cli.env"),
}


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
