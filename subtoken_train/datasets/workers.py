"""Data-loading workers and signals that stop a run."""

from __future__ import annotations

import signal
from types import FrameType


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
