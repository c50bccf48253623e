"""Interleaved timing of two or more things, a program's record, and a table of it."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from subtoken_train.benchmarking.rounds import cell, hardware, middle, ratio, synchronise, turns

__all__ = ["cell", "hardware", "interleaved", "markdown", "middle", "ratio", "write"]


def interleaved(
    actions: Mapping[str, Callable[[], object]], pairs: int, warmup: int = 2, clock: Callable[[], float] = perf_counter
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


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as a page has it."""
    first, *others = (f"| {' | '.join(cells)} |" for cells in (head, *rows))
    return "\n".join([first, "|---" * len(head) + "|", *others])


def write(record: Mapping[str, Any] | Sequence[Any], path: Path) -> None:
    """Write a record, or a list of them, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, separators=(",", ":")) + "\n")
