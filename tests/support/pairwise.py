"""Cells of a test matrix: all pairs of factor levels that are allowed, in few cells."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations

Cell = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]


def pairs_of(cell: Cell) -> Iterable[Pair]:
    """All pairs of (factor, level) in a cell."""
    return combinations(cell.items(), 2)


def complete(part: Cell, factors: dict[str, list[str]], allowed: Callable[[Cell], bool], prefer=None) -> Cell | None:
    """Give the missing factors levels so that the cell is allowed, the preferred first; None where that is impossible.

    ``allowed`` must also judge cells with missing factors, and refuse no more of them than of whole ones.
    """
    if not allowed(part):
        return None
    missing = [name for name in factors if name not in part]
    if not missing:
        return {name: part[name] for name in factors}
    levels = factors[missing[0]]
    if prefer is not None:
        levels = sorted(levels, key=lambda level: -prefer({**part, missing[0]: level}, missing[0]))
    for level in levels:
        whole = complete({**part, missing[0]: level}, factors, allowed, prefer)
        if whole is not None:
            return whole
    return None


def allowed_pairs(factors: dict[str, list[str]], allowed: Callable[[Cell], bool]) -> set[Pair]:
    """Pairs that some allowed cell has."""
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
