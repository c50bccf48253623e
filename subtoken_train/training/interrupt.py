"""Ctrl-C saves a resumable checkpoint first."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback


class TrainingInterrupted(Exception):
    """Raised between two batches after an interrupt, once the checkpoint is written; ``path`` is where."""

    def __init__(self, path: Path, step: int) -> None:
        super().__init__(f"stopped at step {step}; checkpoint {path}")
        self.path = path
        self.step = step


class SaveOnInterrupt(Callback):
    """The first SIGINT finishes the current optimiser step, saves and leaves; a second one leaves at once.

    Args:
        path: the checkpoint to write.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._asked = False
        self._previous: Any = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take over SIGINT."""
        self._previous = signal.signal(signal.SIGINT, self._on_signal)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save and leave, once gradients are not half-accumulated."""
        stepped = trainer.is_last_batch or (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if self._asked and stepped:
            trainer.save_checkpoint(self.path)
            raise TrainingInterrupted(self.path, trainer.global_step)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Give SIGINT back."""
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
