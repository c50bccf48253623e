"""Interleaved timing of two or more things in one process, and where it ran."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

RESAMPLES = 2000


def interleaved(
    actions: Mapping[str, Callable[[], object]],
    pairs: int,
    warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each action, in turns: every round runs each of them once, in an order that alternates."""
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for name, counts in turns(list(actions), pairs, warmup):
        synchronise()
        start = clock()
        actions[name]()
        synchronise()
        if counts:
            seconds[name].append(clock() - start)
    return seconds


def turns(names: Sequence[str], pairs: int, warmup: int) -> Iterator[tuple[str, bool]]:
    """Whose turn it is, and whether it counts: every round has each name once, in an order that alternates."""
    for turn in range(warmup + pairs):
        for name in names if turn % 2 == 0 else names[::-1]:
            yield name, turn >= warmup


def ratio(seconds: Mapping[str, list[float]], ours: str, theirs: str) -> tuple[float, float, float]:
    """Median over rounds of ours / theirs, with its 95 % bootstrap interval."""
    return middle(np.array(seconds[ours]) / np.array(seconds[theirs]))


def middle(values: NDArray[np.float64]) -> tuple[float, float, float]:
    """Median, with its 95 % bootstrap interval."""
    rng = np.random.default_rng(0)
    medians = np.median(values[rng.integers(0, len(values), (RESAMPLES, len(values)))], axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return float(np.median(values)), float(low), float(high)


def cell(figures: tuple[float, float, float]) -> str:
    """``0.52 [0.51, 0.54]``."""
    return "{:.2f} [{:.2f}, {:.2f}]".format(*figures)


def hardware() -> dict[str, Any]:
    """What this ran on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "torch": torch.__version__,
    }


def synchronise() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
