"""When a panel may read the device: at the end of a logging step, and nowhere else.

Logging steps are Lightning's: those whose number ``trainer.log_every_n_steps`` divides; 0 means none.
"""

from __future__ import annotations

from typing import Any

import lightning as L


def stepped(trainer: L.Trainer, batch_idx: int) -> bool:
    """Whether the micro-batch that just ended completed an optimiser step."""
    return trainer.is_last_batch or (batch_idx + 1) % trainer.accumulate_grad_batches == 0


def logs_now(trainer: L.Trainer, batch_idx: int) -> bool:
    """Whether the micro-batch that just ended completed a logging step."""
    return stepped(trainer, batch_idx) and _divides(trainer, trainer.global_step)


def logs_next(trainer: L.Trainer) -> bool:
    """Whether the optimiser step that is under way is a logging step."""
    return _divides(trainer, trainer.global_step + 1)


def _divides(trainer: Any, step: int) -> bool:
    every: int = trainer.log_every_n_steps  # set by Lightning, though not in its annotations
    return every > 0 and step % every == 0
