"""Random tiny models of every family, a module each; a new one is its module, found by itself.

Weights are large enough that a wrong mask, position or order shows. ``FAMILIES`` of each module names what it makes.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module

import torch
from torch import Tensor

from subtoken_train.families.family import Family


@dataclass(frozen=True)
class TinyPicture:
    """A picture in a prompt of random tokens.

    Attributes:
        visual: ids of its run: the placeholders, and any text of its own between them.
        pixels: as ``Batch`` holds them.
        grid: its row of ``Batch.image_grid_I3``; None where the family has none.
        before: ids in front of it.
        after: ids behind it; left out where a prompt ends with its picture.
        seconds: its row of ``Batch.seconds_I``; None where the family has none.
    """

    visual: list[int]
    pixels: Tensor
    grid: list[int] | None = None
    before: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    seconds: float | None = None


Draw = Callable[[Family, torch.Generator, int, int, int], TinyPicture]
"""Called with (family, generator, number of the sample, of its picture, its pictures)."""


@dataclass(frozen=True)
class TinyFamily:
    """A tiny model.

    Attributes:
        name: level of the matrices' factor; a module that draws pictures has one of its family's own name.
        build: makes it.
        picture: draws a picture; None for a language model.
        without: reducers (levels of the matrix) that its tower cannot serve.
        windowed: whether layers attend in sliding windows, which some features do not go with.
        order: its place in the matrices; new families come last.
        crossed: whether the matrices take it; what all families must pass runs on it either way.
    """

    name: str
    build: Callable[[], Family]
    picture: Draw | None = None
    without: frozenset[str] = frozenset()
    windowed: bool = False
    order: int = 99
    crossed: bool = True


def tiny_families() -> dict[str, TinyFamily]:
    """All of them, by name."""
    modules = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    found = [each for module in modules for each in module.FAMILIES]
    return {each.name: each for each in sorted(found, key=lambda family: family.order)}
