"""What a run shows: group usage per layer, kept fraction, tokens per second before and after reduction."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from subtoken_train.functional.usage import group_usage, usage_entropy
from subtoken_train.routing.bank import RoutingState
from subtoken_train.training.module import SubTokenModule


class RunMonitor(Callback):
    """Logs throughput, and per layer the entropy and the largest share of group usage.

    Args:
        every: optimiser steps between two readings.
    """

    def __init__(self, every: int = 20) -> None:
        self.every = every
        self._clock = 0.0
        self._tokens = [0, 0]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self._clock, self._tokens = time.perf_counter(), [0, 0]

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count tokens; log every so often."""
        assert isinstance(pl_module, SubTokenModule)
        before, after = pl_module.last_tokens
        self._tokens[0] += before
        self._tokens[1] += after
        if trainer.global_step % self.every:
            return
        seconds = max(time.perf_counter() - self._clock, 1e-9)
        pl_module.log("tokens_per_s/before", self._tokens[0] / seconds, prog_bar=True)
        pl_module.log("tokens_per_s/after", self._tokens[1] / seconds, prog_bar=True)
        self._clock, self._tokens = time.perf_counter(), [0, 0]
        if pl_module.last_pass is not None:
            self._log_usage(pl_module, pl_module.last_pass)

    def _log_usage(self, module: SubTokenModule, state: RoutingState) -> None:
        for layer, mask in state.masks.items():
            usage = group_usage(mask, state.routed_BN)
            module.log(f"group_usage_entropy/layer_{layer}", usage_entropy(usage))
            module.log(f"group_usage_max/layer_{layer}", float(usage.max()))
