"""The parser behind ``RecipeCLI``, and which data module a recipe means."""

from __future__ import annotations

from typing import Any, NoReturn

from lightning.pytorch.cli import LightningArgumentParser

from subtoken_train.datasets.corpus_datamodule import CorpusDataModule
from subtoken_train.datasets.datamodule import InstructionDataModule, RecallDataModule
from subtoken_train.datasets.ordered import OrderedDataModule
from subtoken_train.reducers.base import Reducer
from subtoken_train.training.module import SubTokenModule


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
        if theclass is not SubTokenModule:
            return super().add_class_arguments(theclass, *args, **settings)
        added = super().add_class_arguments(theclass, *args, **settings, skip={"reducer"})
        super().add_class_arguments(self.reducer, "model.reducer", sub_configs=False)
        return added

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise ``message``."""
        raise ValueError(message)


def data_module_of(keys: set[str]) -> type[OrderedDataModule[Any]]:
    """Which data a ``data`` band of these keys speaks of: a corpus (``train``), recall (``num_facts``) or records."""
    if "train" in keys:
        return CorpusDataModule
    return RecallDataModule if "num_facts" in keys else InstructionDataModule
