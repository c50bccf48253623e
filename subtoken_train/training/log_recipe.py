"""The resolved recipe in every logger, so that runs can be compared by what they were."""

from __future__ import annotations

from typing import Any

import lightning as L
import yaml
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger


class LogRecipe(Callback):
    """Hands the recipe to each logger as hyper-parameters, once, in the first process only.

    TensorBoard shows it as a text, ``recipe``.

    Args:
        recipe: plain values.
    """

    def __init__(self, recipe: dict[str, Any]) -> None:
        self.recipe = recipe

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log it."""
        for logger in trainer.loggers:
            logger.log_hyperparams(self.recipe)
            if isinstance(logger, TensorBoardLogger):
                indented = "".join(
                    f"    {line}\n" for line in yaml.safe_dump(self.recipe, sort_keys=False).splitlines()
                )
                logger.experiment.add_text("recipe", indented, trainer.global_step)
