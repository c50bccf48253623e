"""Progress for logs: a line every so many steps, where a bar would print one per batch."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar


class LineProgress(ProgressBar):
    """Prints step, metrics of the progress bar and speed every ``every`` optimiser steps, from process 0.

    Args:
        every: optimiser steps between two lines.
    """

    def __init__(self, every: int) -> None:
        super().__init__()
        self.every, self._enabled = every, True
        self._last_step, self._clock = 0, 0.0

    def enable(self) -> None:
        """Print."""
        self._enabled = True

    def disable(self) -> None:
        """Do not print."""
        self._enabled = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self._last_step, self._clock = trainer.global_step, time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Print if a step was completed and it is its turn."""
        step = trainer.global_step
        if not self._enabled or step == self._last_step or (step % self.every and step != trainer.max_steps):
            return
        speed = (step - self._last_step) / max(time.perf_counter() - self._clock, 1e-9)
        self._last_step, self._clock = step, time.perf_counter()
        total = f"/{trainer.max_steps}" if trainer.max_steps > 0 else f" (epoch {trainer.current_epoch})"
        values = [f"{name} {value:.4g}" for name, value in trainer.progress_bar_metrics.items()]
        print("  ".join([f"step {step}{total}", *values, f"{speed:.2f} steps/s"]), flush=True)
