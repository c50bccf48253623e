# PYTHON_ARGCOMPLETE_OK
"""Entry point of ``subtoken-train``: finds the command, parses its arguments, guards its errors.

A new command costs its file, which has its name, and one line here. The module exposes ``HELP``,
``add_arguments(parser)`` and ``run(args) -> int``, or ``HELP`` (the whole text) and ``run_raw(argv) -> int``.
"""

import importlib
import os
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from types import ModuleType

from subtoken_train.cli.command_line import Parser, check_options
from subtoken_train.cli.terminal import PROGRAM, guarded, quiet_environment
from subtoken_train.errors import check_word, refuse, unknown_name
from subtoken_train.version import __version__

COMMANDS = {
    "init": "your own images, questions or texts as records, splits and a recipe",
    "fit": "train LoRA and routers from a recipe",
    "check": "what a recipe trains and costs, before it runs",
    "preview": "training samples as the loss sees them",
    "evaluate": "score an adapter, or a backbone, on a data file",
    "compare": "a run on texts beside its anchor and untrained rules, at equal bytes",
    "report": "tables, curves and one HTML page from results",
    "generate": "answer one prompt from a compressed cache",
    "demo": "a page in the browser: backbone, anchor and routed model side by side",
    "serve": "an OpenAI-compatible server on compressed caches",
    "benchmark": "time prompts and steps, beside anchor and full cache",
    "calibrate": "measure the numbers that a method needs",
    "axes": "a copy of a model whose value groups lose less",
    "diagnose": "what an adapter's routers do with their budget",
    "export": "adapter folder or merged weights from a run, and the Hub",
    "data": "make a data set or check one, or fetch a real model",
    "sweep": "train a grid of overrides of a recipe",
    "recipes": "list, show or copy the shipped recipes",
    "budget": "what a keep ratio and S/K groups cost, and the matched anchor",
    "recommend": "the measured setting that loses least in a budget of bytes",
    "env": "versions and hardware, for bug reports",
}
"""By name: one line for ``subtoken-train --help``."""
HELP_OPTIONS = ("-h", "--help")


def overview() -> str:
    """Return the text of ``subtoken-train --help``."""
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items())
    return (
        f"usage: {PROGRAM} COMMAND ...\n\n"
        "Sub-token routing for KV-cache compression: train, run and compare value-group routers.\n\n"
        f"commands:\n{rows}\n\n"
        f"'{PROGRAM} COMMAND --help' explains a command; '{PROGRAM} --version' prints the version."
    )


def command_module(name: str) -> ModuleType:
    """Import the module of a command; ``env`` is the part of ``check`` that is about the machine."""
    return importlib.import_module(f"{__package__}.{'check' if name == 'env' else name}")


def help_of(module: ModuleType, argv: Sequence[str] = ()) -> str:
    """Return the help of a command with ``run_raw``; ``fit`` adds the keys of a recipe on its command line."""
    return str(module.help_text(list(argv)) if hasattr(module, "help_text") else module.HELP)


def run_command(name: str, argv: Sequence[str]) -> int:
    """Import the command's module, parse ``argv`` for it unless it is raw, and run it."""
    check_word("command", name, COMMANDS)
    if name == "env" and not set(argv) & set(HELP_OPTIONS):
        argv = ["--machine", *argv]
    quiet_environment()
    module = command_module(name)
    if hasattr(module, "run_raw"):
        if not set(argv) & set(HELP_OPTIONS):
            needed = f"{name} needs --config RECIPE: see '{PROGRAM} recipes ls' and '{PROGRAM} {name} --help'"
            refuse((not argv, needed))
            return int(module.run_raw(list(argv)))
        print(help_of(module, argv))
        return 0
    parser = Parser(prog=f"{PROGRAM} {name}", description=module.HELP, formatter_class=RawDescriptionHelpFormatter)
    module.add_arguments(parser)
    check_options(parser, argv)
    return int(module.run(parser.parse_args(argv)))


def dispatch(argv: Sequence[str]) -> int:
    """Answer ``--help`` and ``--version``, hand everything else to its command."""
    first, *rest = argv or ["--help"]
    if first in HELP_OPTIONS:
        print(overview())
    elif first == "--version":
        print(f"{PROGRAM} {__version__}")
    elif first.startswith("-"):
        raise unknown_name("option", first, ("--help", "--version"))
    else:
        return run_command(first, rest)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line (None: that of the process, without the program's name) and return its exit code."""
    if "_ARGCOMPLETE" in os.environ:
        from subtoken_train.cli.recipe_help import offer

        offer(Parser(prog=PROGRAM), COMMANDS, command_module)
    return guarded(lambda: dispatch(sys.argv[1:] if argv is None else argv))
