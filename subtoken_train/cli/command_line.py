"""The words of a command line: argparse's with mistakes in our words, and those behind commands that take a recipe."""

import argparse
import os
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from subtoken_train.errors import instead, refuse, unknown_name
from subtoken_train.evictions import EVICTIONS, WRAPPERS
from subtoken_train.outputs import check_place
from subtoken_train.reducers import REDUCERS
from subtoken_train.resources import find_recipe
from subtoken_train.settings import ARM_SETTINGS, FLAGGED, ArmSettings

if TYPE_CHECKING:
    from subtoken_train.inference.arm_spec import ArmSpec

FLAGS = ("overwrite", "resume", "private")
"""Flags that only the command line may give; a recipe that gave them would act on its own."""
_CONFIG = ("--config", "-c")
_BARE = (*(f"--{flag}" for flag in FLAGS), "--help", "-h", "--print_config")


class Parser(ArgumentParser):
    """``ArgumentParser`` without usage dumps and without abbreviated options."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})

    def error(self, message: str) -> NoReturn:
        """Raise ``ValueError`` instead of printing the usage and exiting."""
        if found := re.fullmatch(r"argument (\S+): invalid (int|float) value: (.*)", message):
            message = f"{found[1]} is {found[3]}; it must be {'a whole number' if found[2] == 'int' else 'a number'}"
        if message.startswith("unrecognized") and "--backbone" in self._option_string_actions:
            message += "; a model follows --backbone or --adapter"
        raise ValueError(f"{message} (see '{self.prog} --help')")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise unknown_name(action.dest, value, map(str, action.choices))


def _option_names(parser: ArgumentParser) -> set[str]:
    names: set[str] = set()
    for action in parser._actions:
        names.update(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            names.update(*map(_option_names, action.choices.values()))
    return names


def check_options(parser: ArgumentParser, argv: Sequence[str]) -> None:
    """Refuse the first unknown ``--option``, before argparse names a missing one."""
    known = _option_names(parser)
    for token in takewhile(lambda token: token != "--", argv):
        name = token.split("=", 1)[0]
        if name.startswith("--") and name not in known and " " not in name:
            words = instead(parser.prog.rpartition(" ")[2], name)
            refuse((words, f"unknown option {name!r}; {words}"))
            raise unknown_name("option", name, (option for option in known if option.startswith("--")))


def check_counts(args: Namespace, *names: str) -> None:
    """Raise a worded ``ValueError`` where one of these options is given and below 1, or any of its numbers is."""
    for name in names:
        given = getattr(args, name)
        for value in given if isinstance(given, list) else [given]:
            refuse((value is not None and value < 1, f"{spelled_flag(name)} {value} must be at least 1"))


def check_output(folder: object) -> bool:
    """Refuse a folder that cannot be written, and return True; a launcher's processes, which would meet, look later."""
    if looks := isinstance(folder, str) and folder and not {"RANK", "LOCAL_RANK", "SLURM_JOB_ID"} & os.environ.keys():
        check_place(Path(folder) / "new" if Path(folder).is_dir() else Path(folder))
    return bool(looks)


def hourly_price(text: str) -> float:
    """Parse what one GPU costs an hour, in whatever currency; argparse shows the error."""
    with suppress(ValueError):
        if 0 < (price := float(text)) < inf:
            return price
    raise argparse.ArgumentTypeError(f"{text!r} is not a price; give what a GPU costs an hour, such as 2.5")


def check_unused(args: Namespace, names: Iterable[str], words: str, **defaults: object) -> None:
    """Raise a ``ValueError`` for the first of these options that is given: ``--NAME``, and ``words`` that say why."""
    for name in names:
        if getattr(args, name) not in (None, False, [], "", "model", defaults.get(name)):
            raise ValueError(f"{spelled_flag(name)} {words}")


@dataclass(frozen=True)
class Words:
    """Words behind ``fit``, ``check`` or ``preview``: recipes, and options with their texts (None: none)."""

    configs: tuple[str, ...]
    options: tuple[tuple[str, str | None], ...]


def split_words(argv: list[str]) -> Words:
    """Tell recipes, options and flags apart."""
    configs, options, place = list[str](), list[tuple[str, str | None]](), 0
    while place < len(argv):
        word, place = argv[place], place + 1
        name, equals, text = word.partition("=")
        if not _is_option(word):
            is_recipe = word.endswith((".yaml", ".yml")) or find_recipe(word)
            hint = f"a recipe is passed as --config {word}" if is_recipe else "options start with --"
            raise ValueError(f"unexpected argument {word!r}; {hint}")
        value = text if equals else "true" if name.removeprefix("--") in FLAGS else None
        if not equals and word not in _BARE and place < len(argv) and not _is_option(argv[place]):
            value, place = argv[place], place + 1
        if name not in _CONFIG:
            options.append((name.lstrip("-"), value))
        elif not value:
            raise ValueError(f"{name} names no file; write {name} RECIPE.yaml")
        elif options and not configs:
            first = options[0][0]
            raise ValueError(f"--{first} stands before --config and would be overridden by it; put --config first")
        else:
            configs.append(value)
    return Words(tuple(configs), tuple(options))


def _is_option(word: str) -> bool:
    return word.startswith("--") or word.partition("=")[0] in ("-c", "-h")


EVICTION_SETTINGS = ("eviction", "eviction_keep", "eviction_every", "eviction_options", "scope")


def add_compression_options(parser: ArgumentParser) -> None:
    """Add a plain backbone's reducer and groups, an adapter's bytes, and every model's eviction, cache and dtype."""
    add_settings(parser, *(name for name in FLAGGED if name not in ("adapter", "backbone", "protocol")))


def add_settings(parser: ArgumentParser, *names: str) -> None:
    """Add options for settings of an arm, as ``ArmSettings`` declares them."""
    listed = {"reducers": ", ".join(REDUCERS), "evictions": ", ".join(EVICTIONS), "wrappers": ", ".join(WRAPPERS)}
    for name in names:
        setting = ARM_SETTINGS[name]
        words = re.sub(r"`(\w+)`", lambda found: spelled_flag(found[1]), setting.words.format(**listed))
        how: dict[str, Any] = {"metavar": setting.metavar, "type": setting.kind}
        if setting.kind is dict:
            how |= {"action": "append", "default": [], "type": str}
            words = f"{words}; repeatable"
        elif setting.kind is bool:
            how = {"action": "store_true", "default": None}
        parser.add_argument(spelled_flag(name), help=words.replace("%", "%%"), **how)
    if "kv_dtype" in names:
        parser.set_defaults(kv_dtype=ArmSettings.kv_dtype)


def flag_name(name: str) -> str:
    """Return a setting's name among parsed options: a method's settings are given by a flag each."""
    return name.replace("options", "option")


def spelled_flag(name: str) -> str:
    """Return a setting as a command line spells it: ``--eviction-keep``."""
    return f"--{flag_name(name).replace('_', '-')}"


def arm_options(args: Namespace) -> dict[str, Any]:
    """Return the options that are given, as ``ArmSpec`` names them; ``adapter`` is left to the command."""
    names = [name for name in FLAGGED if name not in ("adapter", "eviction_options")]
    given = {name: value for name in names if (value := getattr(args, name, None)) is not None}
    if getattr(args, "eviction_option", None):
        from subtoken_train.inference.compression import parse_settings

        given["eviction_options"] = parse_settings(args.eviction, args.eviction_option)
    return given


def flagged_arm(args: Namespace, **model: str | None) -> "ArmSpec":
    """Return the arm that the options name; what is not there is refused here, before torch is loaded."""
    from subtoken_train.artifact.hub import adapter_folder, check_there
    from subtoken_train.inference.arm_spec import ArmSpec

    if (arm := ArmSpec(**{**arm_options(args), **model}, written="flag")).adapter is not None:
        adapter_folder(arm.adapter)
    if arm.backbone is not None:
        check_there(arm.backbone)
    return arm
