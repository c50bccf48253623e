"""Random state of a process, for checkpoints: LoRA dropout must go on where it stopped."""

from __future__ import annotations

import random
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback


class RandomState(Callback):
    """Saves Python's, NumPy's and torch's generators with every checkpoint, and restores them at the next batch."""

    def __init__(self) -> None:
        self._resumed: dict[str, Any] = {}

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Put the generators' states into ``checkpoint``."""
        kind, keys, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002  # libraries draw from it
        checkpoint["random_state"] = {
            "python": random.getstate(),
            "numpy": (kind, torch.from_numpy(np.array(keys, dtype=np.int64)), position, has_gauss, gauss),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the states until the first batch: loading data and sanity checks draw numbers too."""
        self._resumed = checkpoint["random_state"]

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Restore the generators before the first batch after a resume."""
        if not self._resumed:
            return
        state, self._resumed = self._resumed, {}
        random.setstate(state["python"])
        kind, keys, position, has_gauss, gauss = state["numpy"]
        numpy_state = (kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss)
        np.random.set_state(numpy_state)  # noqa: NPY002
        torch.set_rng_state(state["torch"])
        if state["cuda"]:
            torch.cuda.set_rng_state_all(state["cuda"])
