"""Many cases in a row, and what came of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from subtoken_train.kernels.native import library
from tests.hostile import canary_module
from tests.hostile.case import Expect, Outcome, Place, Verdict
from tests.hostile.pool import REPOSITORY
from tests.hostile.registry import CLASSES
from tests.hostile.runner import run_case, snapshot


def plan(seed: int, count: int, names: Sequence[str] = ()) -> list[tuple[str, int]]:
    """Class and seed of every case, the classes in turn by their weights, so that any stretch holds all of them."""
    chosen = {name: weight for name, (_, weight) in CLASSES.items() if not names or name in names}
    places = sorted(((turn + 0.5) / weight, name) for name, weight in chosen.items() for turn in range(weight))
    order = [name for _, name in places]
    return [(order[i % len(order)], seed * 1_000_000 + i) for i in range(count)]


def run_cases(cases: Iterable[tuple[str, int]], folder: Path, pool: Path) -> Iterator[Outcome]:
    """Run and judge the cases one after another in this process; at the end, whether the originals are as they were.

    What a case does to files around it is seen at once; the pool, the recipes and the checkpoints are too much to
    look at after each, so that one more outcome follows where any of them has changed.
    """
    library()  # a process that decodes starts a C compiler once, whatever it was given
    canary_module.install(folder / "modules")
    shared = (pool, REPOSITORY / "recipes", REPOSITORY / "checkpoints", REPOSITORY / "data/digits")
    before = [snapshot(place) for place in shared]
    for name, seed in cases:
        yield run_case(name, CLASSES[name][0], seed, Place(folder / "case", pool))
    for place, then in zip(shared, before, strict=True):
        now = snapshot(place)
        changed = sorted(path for path in then.keys() | now.keys() if then.get(path) != now.get(path))
        changed = [path for path in changed if "__pycache__" not in path]
        if changed:
            yield Outcome("shared:0", f"what {place} holds", Verdict.LOST, f"{changed[:5]}", Expect.REFUSED, None, 0.0)


def bad(outcomes: Sequence[Outcome]) -> list[str]:
    """One line for every case that is not clean."""
    return [f"{o.name} {o.verdict}: {o.what}\n    {o.detail}" for o in outcomes if o.verdict is not Verdict.CLEAN]
