"""Matrices of which ``make test`` tries a part, and cells that hold all pairs of factor levels."""

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest


def sampled(
    names: str | Sequence[str],
    values: Iterable[Any],
    *,
    every: int,
    ids: Callable[[Any], str] | Sequence[str] | None = None,
) -> pytest.MarkDecorator:
    """Parametrize as pytest does, all cells but each ``every``th slow: enough, by benchmarks/README.md, mutants."""
    several = not isinstance(names, str) or "," in names
    return pytest.mark.parametrize(names, cells(values, every=every, several=several), ids=ids)


def cells(values: Iterable[Any], *, every: int, several: bool = False) -> list[Any]:
    """Return the cells of ``sampled`` as parameters, for a fixture too; ``several`` where a cell has several values."""
    given = type(pytest.param())
    sets = [each if type(each) is given else pytest.param(*(each if several else [each])) for each in values]
    return [
        pytest.param(*each.values, marks=[*each.marks, pytest.mark.slow], id=each.id) if number % every else each
        for number, each in enumerate(sets)
    ]


def quick(names: Iterable[str], chosen: Sequence[str]) -> list[Any]:
    every = list(names)
    assert {*chosen} <= {*every}
    return [pytest.param(name, marks=() if name in chosen else pytest.mark.slow, id=name) for name in every]


Cell = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]


def pairs_of(cell: Cell) -> Iterable[Pair]:
    return combinations(cell.items(), 2)


def complete(part: Cell, factors: dict[str, list[str]], allowed: Callable[[Cell], bool], prefer=None) -> Cell | None:
    """Give missing factors allowed levels, the preferred first, or None; ``allowed`` refuses no part of a good cell."""
    if not allowed(part):
        return None
    missing = [name for name in factors if name not in part]
    if not missing:
        return {name: part[name] for name in factors}
    levels = factors[missing[0]]
    if prefer is not None:
        levels = sorted(levels, key=lambda level: -prefer({**part, missing[0]: level}, missing[0]))
    for level in levels:
        if (whole := complete({**part, missing[0]: level}, factors, allowed, prefer)) is not None:
            return whole
    return None


def allowed_pairs(factors: dict[str, list[str]], allowed: Callable[[Cell], bool]) -> set[Pair]:
    found: set[Pair] = set()
    for first, second in combinations(factors, 2):
        for one in factors[first]:
            for other in factors[second]:
                pair = ((first, one), (second, other))
                if pair not in found and (cell := complete(dict(pair), factors, allowed)) is not None:
                    found.update(pairs_of(cell))
    return found


def pairwise(factors: dict[str, list[str]], allowed: Callable[[Cell], bool]) -> list[Cell]:
    """Cells that together have every allowed pair; greedy, the same at every call."""
    missing, cells = allowed_pairs(factors, allowed), []

    def gain(part: Cell, name: str) -> int:
        return sum(
            tuple(sorted(((other, level), (name, part[name])), key=lambda x: order[x[0]])) in missing
            for other, level in part.items()
            if other != name
        )

    order = {name: i for i, name in enumerate(factors)}
    while missing:
        cell = complete(dict(min(missing)), factors, allowed, gain)
        assert cell is not None
        cells.append(cell)
        missing.difference_update(pairs_of(cell))
    return cells
