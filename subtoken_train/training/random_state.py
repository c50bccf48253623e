"""Every process's generators of random numbers, in the checkpoint and out of it."""

from __future__ import annotations

import random
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn


class RandomState(Callback):
    """Saves Python's, NumPy's and torch's generators of all processes, and restores each at its next batch."""

    def __init__(self) -> None:
        self._resumed: dict[str, Any] = {}

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Put the states of all processes into ``checkpoint``; all of them take part."""
        states = [current_state()]
        if trainer.world_size > 1:
            states *= trainer.world_size
            torch.distributed.all_gather_object(states, states[0])
        checkpoint["random_state"] = states

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep this process's state until the first batch: loading data and sanity checks draw numbers too."""
        states = checkpoint["random_state"]
        if len(states) != trainer.world_size:
            rank_zero_warn(
                f"the checkpoint was written by {len(states)} process(es), this run has {trainer.world_size}: dropout "
                "will not be what it would have been"
            )
        self._resumed = states[trainer.global_rank % len(states)]

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Restore the generators before the first batch after a resume."""
        if self._resumed:
            restore_state(self._resumed)
            self._resumed = {}


def current_state() -> dict[str, Any]:
    """This process's generators, in types that ``torch.load(weights_only=True)`` reads."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002  # libraries draw from it
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.array(keys, dtype=np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def restore_state(state: dict[str, Any]) -> None:
    """Set this process's generators to what ``current_state`` gave."""
    random.setstate(state["python"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    numpy_state = (kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss)
    np.random.set_state(numpy_state)  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
