"""The generator of test cells: every allowed pair, no cell that is not allowed."""

from __future__ import annotations

from itertools import product

from tests.support.sampling import pairs_of, pairwise

FACTORS = {"a": ["1", "2", "3"], "b": ["x", "y"], "c": ["p", "q", "r"], "d": ["0", "1"]}


def allowed(cell: dict[str, str]) -> bool:
    return not (cell.get("a") == "2" and cell.get("b") == "y") and not (cell.get("c") == "r" and cell.get("d") == "1")


def test_all_allowed_pairs_are_covered_by_allowed_cells():
    cells = pairwise(FACTORS, allowed)
    every = [dict(zip(FACTORS, levels, strict=True)) for levels in product(*FACTORS.values())]
    possible = {pair for cell in every if allowed(cell) for pair in pairs_of(cell)}
    assert all(map(allowed, cells))
    assert {pair for cell in cells for pair in pairs_of(cell)} == possible
    assert len(cells) < len(every) / 2
