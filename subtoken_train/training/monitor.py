"""What a run shows: group usage per layer, kept fraction, tokens per second before and after reduction.

Legend: B batch, N positions, S value groups.
"""

from __future__ import annotations

import math
import time
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from subtoken_train.routing.bank import RoutingState
from subtoken_train.training.module import SubTokenModule


def group_usage(mask_BNS: Tensor, routed_BN: Tensor) -> Tensor:
    """Share of the kept (token, group) pairs that falls on each group, [S]; routed tokens only."""
    counts_S = (mask_BNS & routed_BN[..., None]).float().sum((0, 1))
    return counts_S / counts_S.sum().clamp(min=1)


def usage_entropy(usage_S: Tensor) -> float:
    """Entropy of the usage over log S: 1 where all groups are used alike, 0 where one is."""
    if len(usage_S) == 1:
        return 1.0
    logs = usage_S.clamp(min=1e-12).log()
    return float(-(usage_S * logs).sum() / math.log(len(usage_S)))


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
