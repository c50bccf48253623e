"""How long a batch takes, measured: the real model, real batches, forward and backward; nothing is updated."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from subtoken_train.functional.objective import answer_loss, predicting_rows
from subtoken_train.training.module import SubTokenModule
from subtoken_train.types import Batch


def seconds_per_batch(module: SubTokenModule, batches: Iterator[Batch]) -> float | None:
    """Seconds from reading a batch to its gradients, the mean of all but the first one; None without batches.

    The weights are loaded on the CPU. Optimiser, logging, validation and checkpoints are not in it.

    Args:
        module: what is trained; left with gradients, which nobody reads.
        batches: two or more; the first one warms up. The only one counts where there is no other.
    """
    parts, seconds = module.parts, list[float]()
    parts.train()
    clock = time.perf_counter()
    for batch in batches:
        result = parts.run(batch)
        rows, targets = predicting_rows(result.labels(batch.labels_BN))
        with torch.enable_grad():
            torch.autograd.backward(answer_loss(parts.logits(result, rows), targets))
        seconds.append(time.perf_counter() - clock)
        clock = time.perf_counter()
    counted = seconds[1:] or seconds
    return sum(counted) / len(counted) if counted else None
