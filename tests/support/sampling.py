"""Matrices of which ``make test`` tries a part: what differs between two cells is seldom what breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def sampled(
    names: str | Sequence[str],
    values: Iterable[Any],
    *,
    every: int,
    ids: Callable[[Any], str] | Sequence[str] | None = None,
) -> pytest.MarkDecorator:
    """Parametrize as pytest does, with all cells marked slow but each ``every``th, from the first on.

    ``make test-all`` runs them all. That such a part is enough was measured: benchmarks/README.md, mutants.
    """
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
    """Return names as parameters, all marked slow but those of ``chosen``."""
    every = list(names)
    assert {*chosen} <= {*every}
    return [pytest.param(name, marks=() if name in chosen else pytest.mark.slow, id=name) for name in every]
