"""The parser behind ``RecipeCLI``, the keys that it knows, and which data module a recipe means."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from types import UnionType
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

from lightning.pytorch.cli import LightningArgumentParser

from subtoken_train.cli.wording import unknown_key
from subtoken_train.datasets.corpus_datamodule import CorpusDataModule
from subtoken_train.datasets.datamodule import InstructionDataModule
from subtoken_train.datasets.ordered import OrderedDataModule
from subtoken_train.datasets.recall_datamodule import RecallDataModule
from subtoken_train.reducers.base import Reducer
from subtoken_train.training.module import SubTokenModule
from subtoken_train.typed import shown


class RecipeParser(LightningArgumentParser):
    """Errors are a ``ValueError``, which ``RecipeCLI`` words, instead of a usage dump and an exit.

    No value is taken for the name of a further file. A reducer's settings are those of its class.

    Attributes:
        reducer: the recipe's token reducer.
    """

    reducer: type[Reducer]

    def add_class_arguments(self, theclass: type[Any], *args: Any, **kwargs: Any) -> Any:
        """Without configuration files in the place of values."""
        settings = {**kwargs, "sub_configs": False}
        if theclass is SubTokenModule:
            settings["skip"] = {"reducer"}
        added = super().add_class_arguments(theclass, *args, **settings)
        if theclass is SubTokenModule:
            super().add_class_arguments(self.reducer, "model.reducer", sub_configs=False)
        self._try_whole_numbers_first()
        return added

    def _try_whole_numbers_first(self) -> None:
        """Let a whole number stay one where ``int | float`` is asked for, whose parts are tried in order.

        That order is not the one that was written: typing's cache takes ``int | float`` and ``float | int`` for equal,
        and gives back the one that any library asked for first.
        """
        union: Any = Union
        for settings in map(vars, self._actions):
            hint = settings.get("_typehint")
            parts = get_args(hint)
            if get_origin(hint) in (Union, UnionType) and int in parts and float in parts:
                settings["_typehint"] = union[tuple(sorted(parts, key=lambda part: part is float))]

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise ``message``."""
        raise ValueError(message)


def data_module_of(keys: set[str]) -> type[OrderedDataModule[Any]]:
    """Which data a ``data`` band of these keys speaks of: a corpus (``train``), recall (``num_facts``) or records."""
    if "train" in keys:
        return CorpusDataModule
    return RecallDataModule if "num_facts" in keys else InstructionDataModule


def recipe_keys(parser: LightningArgumentParser) -> list[str]:
    """Every key that a recipe may hold, those of optional groups (``model.routing``) included; no group itself."""
    keys: set[str] = set()
    for action in parser._actions:
        keys.update(_keys_below(action.dest, getattr(action, "_typehint", None)))
    keys = {key for key in keys if key.rpartition(".")[2] != "help"}
    groups_of_keys = {key.rsplit(".", depth)[0] for key in keys for depth in range(1, key.count(".") + 1)}
    return sorted(keys - groups_of_keys)


def check_known(content: dict[str, Any], keys: Iterable[str], prefix: str = "") -> None:
    """What the parser lets pass: an unknown key that holds nothing, and an empty list where a group belongs.

    Args:
        content: of a recipe, or of a group in it.
        keys: see ``recipe_keys``.
        prefix: the group's name and a dot.

    Raises:
        ValueError: there is one.
    """
    keys = set(keys)
    groups = {key.rsplit(".", depth)[0] for key in keys for depth in range(1, key.count(".") + 1)}
    for name, value in content.items():
        key = f"{prefix}{name}"
        if key in groups and isinstance(value, dict):
            check_known(value, keys, f"{key}.")
        elif key in groups and value is not None:
            raise ValueError(f"{key} is {shown(value)}; it must be a group of keys")
        elif key.removesuffix("+") not in keys | groups and value in ({}, []):
            raise ValueError(unknown_key("key", key, keys))


def _keys_below(name: str, hint: Any) -> Iterator[str]:
    """The keys of the optional groups in a type hint (their own optional groups included), or ``name`` itself."""
    groups = [part for part in get_args(hint) if dataclasses.is_dataclass(part)]
    if not groups:
        yield name
    for group in groups:
        for key, inner in get_type_hints(group).items():
            yield from _keys_below(f"{name}.{key}", inner)
