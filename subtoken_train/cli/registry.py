"""The commands of ``subtoken-train``: a new command costs its file and one line here.

A command module exposes ``HELP`` (the text above its options), ``add_arguments(parser)`` and ``run(args) -> int``.
A raw command parses its own arguments and exposes ``run_raw(argv) -> int`` instead. Modules are imported when their
command is called, never for the list.
"""

from __future__ import annotations

from dataclasses import dataclass


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
