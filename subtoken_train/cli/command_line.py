"""The words of a command line: argparse's with mistakes in our words, and those behind commands that take a recipe.

A mistake is one short ``ValueError`` that names the nearest valid option or choice.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

from subtoken_train.errors import unknown_name

FLAGS = ("overwrite", "resume", "private")
"""Flags that only the command line may give; a recipe that gave them would act on its own."""
_CONFIG = ("--config", "-c")
_BARE = (*(f"--{flag}" for flag in FLAGS), "--help", "-h", "--print_config")


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


def check_counts(args: argparse.Namespace, *names: str) -> None:
    """Raise a worded ``ValueError`` where one of these options is given and below 1."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least 1")


@dataclass(frozen=True)
class Words:
    """Words that follow ``fit``, ``check`` or ``preview``.

    Recipes, options with their texts (None: none), and others.
    """

    configs: tuple[str, ...]
    options: tuple[tuple[str, str | None], ...]
    stray: tuple[str, ...]


def split_words(argv: list[str]) -> Words:
    """Tell recipes, options and flags apart."""
    configs: list[str] = []
    options: list[tuple[str, str | None]] = []
    stray: list[str] = []
    place = 0
    while place < len(argv):
        word, place = argv[place], place + 1
        name, equals, text = word.partition("=")
        following = argv[place] if place < len(argv) and not _is_option(argv[place]) else None
        if not _is_option(word):
            stray.append(word)
        elif equals or word in _BARE or following is None:
            value = text if equals else "true" if name.removeprefix("--") in FLAGS else None
            _add(name, value, configs, options)
        else:
            _add(name, following, configs, options)
            place += 1
    return Words(tuple(configs), tuple(options), tuple(stray))


def _is_option(word: str) -> bool:
    return word.startswith("--") or word.partition("=")[0] in ("-c", "-h")


def _add(name: str, value: str | None, configs: list[str], options: list[tuple[str, str | None]]) -> None:
    if name not in _CONFIG:
        options.append((name.lstrip("-"), value))
        return
    if not value:
        raise ValueError(f"{name} names no file; write {name} RECIPE.yaml")
    if options and not configs:
        raise ValueError(f"--{options[0][0]} stands before --config and would be overridden by it; put --config first")
    configs.append(value)


@dataclass(frozen=True)
class SweepRun:
    """One combination of a sweep, or one fit of a grid; ``name`` is its overrides in short, and its folder's name."""

    name: str
    folder: Path
    configs: tuple[str, ...]
    overrides: tuple[tuple[str, str], ...]

    def fit_arguments(self) -> list[str]:
        """``fit --config ... --KEY=VALUE ... --output_dir=...``."""
        configs = [word for path in self.configs for word in ("--config", path)]
        overrides = [f"--{key}={value}" for key, value in self.overrides]
        return ["fit", *configs, *overrides, f"--output_dir={self.folder}"]

    @property
    def finished(self) -> bool:
        """True if the run has left its adapter, which is written last."""
        return (self.folder / "adapter" / "subtoken_config.json").is_file()

    @property
    def resumable(self) -> bool:
        """True if the run stopped after a checkpoint."""
        from subtoken_train.training.checkpoints import newest_complete

        return newest_complete(self.folder / "checkpoints") is not None

    def last_metrics(self, names: Sequence[str]) -> dict[str, float]:
        """The last value of each metric in the run's CSV logs, and the last ``step``; without what was never logged."""
        from subtoken_train.cli.loggers import logged

        courses = logged(self.folder)
        steps = {step for course in courses.values() for step in course}
        last = {name: courses[name][max(courses[name])] for name in names if name in courses}
        return {**last, "step": float(max(steps))} if steps else last
