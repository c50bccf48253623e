"""Interleaved timing of two or more things, and a program's record."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from subtoken_train.benchmarking.rounds import cell, hardware, middle, ratio, synchronise, turns

__all__ = ["cell", "hardware", "interleaved", "middle", "ratio", "write"]


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


def write(record: Mapping[str, Any] | Sequence[Any], path: Path) -> None:
    """Write a record, or a list of them, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
