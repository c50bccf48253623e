"""Tokens per second before and after reduction, the budget, and learning rates; and what a step costs in FLOPs.

Of the first process; wall time from one reading to the next, without validation and evaluation.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from subtoken_train.families.family import Family
from subtoken_train.ledger.flops import DecoderSize, TrainingFlops
from subtoken_train.ledger.kv_budget import KVBudget
from subtoken_train.training.module import SubTokenModule
from subtoken_train.training.panels import kind_and_layer, logs_now
from subtoken_train.types import Region


class Stopwatch:
    """Seconds since the last ``restart``, pauses left out."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin at zero."""
        self._start = time.perf_counter()

    def seconds(self) -> float:
        """Return the time on the watch."""
        return max(time.perf_counter() - self._start, 1e-9)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Stand still inside the block."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._start += time.perf_counter() - begin


class Throughput(Callback):
    """Logs ``tokens_per_s``, ``train/kv_fraction`` and ``learning_rate``."""

    def __init__(self) -> None:
        self.watch = Stopwatch()
        self._tokens: Tensor | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._restart()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        record = pl_module.last_step
        assert record is not None
        counts = torch.stack([(record.regions_BN != Region.PADDING).sum(), record.rows.visible_BM.sum()])
        self._tokens = counts if self._tokens is None else self._tokens + counts
        if logs_now(trainer, batch_idx):
            self._log(trainer, pl_module)
            self._restart()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._pause = self.watch.pause()
        self._pause.__enter__()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._pause.__exit__(None, None, None)

    def _restart(self) -> None:
        self._tokens = None
        self.watch.restart()

    def _log(self, trainer: L.Trainer, module: SubTokenModule) -> None:
        assert self._tokens is not None
        assert module.last_step is not None
        counts = torch.stack([*self._tokens, *module.last_step.compressed()])
        before, after, entries, kept = counts.tolist()  # waits: the time is real
        seconds = self.watch.seconds()
        module.log("tokens_per_s/before", before / seconds, prog_bar=True)
        module.log("tokens_per_s/after", after / seconds, prog_bar=True)
        if kept:
            budget = KVBudget() if module.routing_config is None else module.routing_config.token_budget
            module.log("train/kv_fraction", replace(budget, keep_ratio=kept / entries).total_kv_fraction)
        for group in trainer.optimizers[0].param_groups:
            module.log(f"learning_rate/{group['name']}", float(group["lr"]))


def flops_of(family: Family, trained: Mapping[str, nn.Parameter]) -> TrainingFlops:
    """Return the cost of rows in a family's decoder; ``trained``: a module's tensors that train, by name."""
    shape = family.shape
    counts = [0] * shape.num_layers
    for name, parameter in trained.items():
        # DeepSpeed's stage 3 leaves an empty tensor with the real count beside it
        counts[kind_and_layer(name)[1]] += int(getattr(parameter, "ds_numel", parameter.numel()))
    return TrainingFlops(DecoderSize.of(family.decoder.config, shape.num_kv_heads, shape.head_dim), counts)
