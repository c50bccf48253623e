"""Many cases in a row, and what came of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from hostile import canary_module
from hostile.case import Outcome, Place, Verdict
from hostile.registry import CLASSES
from hostile.runner import run_case


def plan(seed: int, count: int, names: Sequence[str] = ()) -> list[tuple[str, int]]:
    """Class and seed of every case, the classes in turn by their weights, so that any stretch holds all of them."""
    chosen = {name: weight for name, (_, weight) in CLASSES.items() if not names or name in names}
    places = sorted(((turn + 0.5) / weight, name) for name, weight in chosen.items() for turn in range(weight))
    order = [name for _, name in places]
    return [(order[i % len(order)], seed * 1_000_000 + i) for i in range(count)]


def run_cases(cases: Sequence[tuple[str, int]], folder: Path, pool: Path) -> Iterator[Outcome]:
    """Run and judge the cases one after another in this process."""
    canary_module.install(folder / "modules")
    for name, seed in cases:
        yield run_case(name, CLASSES[name][0], seed, Place(folder / "case", pool))


def bad(outcomes: Sequence[Outcome]) -> list[str]:
    """One line for every case that is not clean."""
    return [f"{o.name} {o.verdict}: {o.what}\n    {o.detail}" for o in outcomes if o.verdict is not Verdict.CLEAN]
