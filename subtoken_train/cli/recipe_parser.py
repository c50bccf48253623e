"""The parser behind ``RecipeCLI``, and which data module a recipe means."""

from __future__ import annotations

from typing import Any, NoReturn

from lightning.pytorch.cli import LightningArgumentParser

from subtoken_train.datasets.corpus_datamodule import CorpusDataModule
from subtoken_train.datasets.datamodule import InstructionDataModule, RecallDataModule
from subtoken_train.datasets.ordered import OrderedDataModule


class RecipeParser(LightningArgumentParser):
    """Errors are a ``ValueError``, which ``RecipeCLI`` words, instead of a usage dump and an exit.

    No value is taken for the name of a further file.
    """

    def add_class_arguments(self, *args: Any, **kwargs: Any) -> Any:
        """Without configuration files in the place of values."""
        return super().add_class_arguments(*args, **{**kwargs, "sub_configs": False})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise ``message``."""
        raise ValueError(message)


def data_module_of(keys: set[str]) -> type[OrderedDataModule[Any]]:
    """Which data a ``data`` band of these keys speaks of: a corpus (``train``), recall (``num_facts``) or records."""
    if "train" in keys:
        return CorpusDataModule
    return RecallDataModule if "num_facts" in keys else InstructionDataModule
