"""The pages of the command line, from ``--help``."""

import argparse
import os
from typing import Any
from unittest import mock

from subtoken_train.cli.command_line import Parser
from subtoken_train.cli.main import COMMANDS, command_module, help_of
from subtoken_train.cli.recipe_source import shipped_schema
from subtoken_train.cli.terminal import PROGRAM

HEAD = f"""# Command line

The page of a command is what `{PROGRAM} COMMAND --help` prints; `{PROGRAM} --help` lists them, `{PROGRAM} --version`
prints the version. A mistake is one line and exit code 2; exit code 1 is a failure of ours.

| command | what it is for |
|---|---|
"""


def commands_page() -> str:
    """Return the text of the overview: a row for each command, with an anchor that older addresses end in."""
    rows = [f'| <a id="{name}"></a>[`{name}`](cli/{name}.md) | {summary} |\n' for name, summary in COMMANDS.items()]
    return "".join([HEAD, *rows])


def command_page(name: str) -> str:
    """Return the text of a command's page."""
    parts = _trainer_parts() if name == "fit" else ""
    return f"# {PROGRAM} {name}\n\n{_summary(name)} [All commands](../cli.md).\n\n{_block(command_help(name))}{parts}"


def _trainer_parts() -> str:
    """Settings of Lightning's strategies, loggers and callbacks, which ``--help`` does not list."""
    rows = []
    for place, own in shipped_schema()["properties"]["trainer"]["properties"].items():
        for kind, of_kind in ((kind, below) for part in own.get("anyOf", ()) for kind, below in _named(part).items()):
            if settings := [name for part in (of_kind, *of_kind.get("anyOf", ())) for name in _named(part)]:
                rows.append(f"| `trainer.{place}.{kind}` | {', '.join(f'`{name}`' for name in settings)} |\n")
    return f"\n## Parts of the trainer\n\n| key | its settings |\n|---|---|\n{''.join(rows)}"


def _named(schema: dict[str, Any]) -> dict[str, Any]:
    return schema.get("properties", {})


def _summary(name: str) -> str:
    text = COMMANDS[name]
    return f"{text[0].upper()}{text[1:]}."


def command_help(name: str) -> str:
    """A command's help, and that of its actions below it."""
    module = command_module(name)
    if hasattr(module, "run_raw"):
        return help_of(module)
    parser = Parser(
        prog=f"{PROGRAM} {name}", description=module.HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.add_arguments(parser)
    with mock.patch.dict(os.environ, {"COLUMNS": "100"}):  # argparse's width
        return "\n\n".join(each.format_help().rstrip() for each in (parser, *_actions(parser)))


def _actions(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """The parsers of a command's actions, each once."""
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return list({id(each): each for action in found for each in action.choices.values()}.values())


def _block(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```\n"
