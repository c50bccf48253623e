"""What goes around a data loader: accumulation windows, and workers that outlive a stop signal."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from itertools import islice
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader

from subtoken_train.types import Batch


class AccumulationWindows:
    """Yields each micro-batch with the labelled tokens and the number of micro-batches of its window.

    Averaging micro-batch means would weigh a short answer's tokens more than a long one's. The sum over the window is
    known only by looking ahead: ``size`` batches are held at a time.

    Args:
        loader: yields ``Batch``.
        size: micro-batches per optimiser step (``trainer.accumulate_grad_batches``).
        first: the micro-batch of the epoch that the loader starts with; Lightning's windows count from the epoch's
            first.
    """

    def __init__(self, loader: DataLoader[Any], size: int, first: Callable[[], int] = lambda: 0) -> None:
        self.loader = loader
        self.size = size
        self.first = first

    def __len__(self) -> int:
        """Micro-batches."""
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Batch, int, int]]:
        """(micro-batch, labelled tokens of its window, micro-batches of its window).

        Raises:
            ValueError: the loader starts inside a window: the gradients of its first part are in no checkpoint.
        """
        if self.first() % self.size:
            raise ValueError(
                f"training would start with micro-batch {self.first()} of the epoch, inside an accumulation window of "
                f"{self.size}; resume from a checkpoint taken after an optimiser step, with the same "
                "accumulate_grad_batches"
            )
        batches: Iterator[Batch] = iter(self.loader)
        while window := list(islice(batches, self.size)):
            # the first label of a sequence is never a target
            tokens = sum(int((batch.labels_BN[:, 1:] != -100).sum()) for batch in window)
            for batch in window:
                yield batch, tokens, len(window)


def outlive_stop_signals(worker: int) -> None:
    """Let a worker go on where a signal was meant for the whole run, for ``DataLoader(worker_init_fn=...)``.

    Ctrl-C and SLURM signal every process of a run. The training process then finishes its step, for which it needs its
    workers, and ends them itself. A second SIGTERM does end a worker: multiprocessing's last resort at exit.

    Args:
        worker: its number, not used.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _next_time)


def _next_time(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
