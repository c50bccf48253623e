"""Progress for terminals: Lightning's Rich bar without what means nothing here."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import RichProgressBar


class BarProgress(RichProgressBar):
    """Names the last epoch only where there is one, and no version of a logger."""

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        """What modules log for the bar; runs are told apart by their folders, not by ``v_num``."""
        return {name: value for name, value in super().get_metrics(trainer, pl_module).items() if name != "v_num"}

    def _get_train_description(self, current_epoch: int) -> str:
        """``Epoch 0/2``, or ``Epoch 0`` where ``max_steps`` ends the run (Lightning: ``Epoch 0/-2``)."""
        described = str(super()._get_train_description(current_epoch))
        return described.replace("/-2", "") if self.trainer.max_epochs == -1 else described
