"""Random tiny models of every family, a module each; a new one is its module, found by itself.

Weights are large enough that a wrong mask, position or order shows. ``FAMILIES`` of each module names what it makes.
"""

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module

import torch
from torch import Tensor

from subtoken_train.families.family import Family


@dataclass(frozen=True)
class TinyPicture:
    """A picture in a prompt of random tokens: the ids of its run, text between placeholders too, and beside it."""

    visual: list[int]
    pixels: Tensor
    grid: list[int] | None = None  # its row of ``Batch.image_grid_I3``
    before: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)  # left out where a prompt ends with its picture
    seconds: float | None = None  # its row of ``Batch.seconds_I``


Draw = Callable[[Family, torch.Generator, int, int, int], TinyPicture]
"""Called with (family, generator, number of the sample, of its picture, its pictures)."""


@dataclass(frozen=True)
class TinyFamily:
    """A tiny model, by its level of the matrices' factor; a module that draws pictures has one of its family's name."""

    name: str
    build: Callable[[], Family]
    picture: Draw | None = None  # None for a language model
    without: frozenset[str] = frozenset()  # reducers (levels of the matrix) that its tower cannot serve
    windowed: bool = False  # layers attend in sliding windows, which some features do not go with
    order: int = 99  # place in the matrices; new families come last
    crossed: bool = True  # whether the matrices take it; what all families must pass runs on it either way


def tiny_families() -> dict[str, TinyFamily]:
    modules = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    found = [each for module in modules for each in module.FAMILIES]
    return {each.name: each for each in sorted(found, key=lambda family: family.order)}
