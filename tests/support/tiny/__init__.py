"""Random tiny models of every family, a module each; a new one is its module, found by itself.

Weights are large enough that a wrong mask, position or order shows; where attention is sharpened by less than 1, it is
less sharp than they make it, which multiplies rounding errors. ``FAMILIES`` of each module names what it makes.
"""

import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from subtoken_train.datasets.collate import Collator
from subtoken_train.datasets.records import Record
from subtoken_train.families.family import Family
from subtoken_train.types import Batch, Region, Turn


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


TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
Said = tuple[str, str]  # a question and its answer


def decoder_sizes(vocabulary: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    """Three layers of four query heads; weights are large enough that a wrong position or order shows."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": kv_heads}
    sizes = {"vocab_size": vocabulary, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, **heads}
    return {**sizes, "max_position_embeddings": 2048, "initializer_range": 0.2, **more}


def noise(height: int, width: int, seed: int = 0) -> Image.Image:
    generator = torch.Generator().manual_seed(seed)
    return Image.fromarray(torch.randint(256, (height, width, 3), generator=generator, dtype=torch.uint8).numpy())


def noises(sizes: Sequence[tuple[int, int]]) -> list[Image.Image]:
    return [noise(*size, seed=i) for i, size in enumerate(sizes)]


def records_of(
    folder: Path, sizes: Sequence[tuple[int, int]], one: Said, turns: Sequence[Said], text: Said, alone: int = 0
) -> list[Record]:
    """A record of the picture ``alone``, one of all others in two turns, one of text only; pictures are written."""
    paths = [folder / f"{i}.png" for i in range(len(sizes))]
    for path, picture in zip(paths, noises(sizes), strict=True):
        picture.save(path)
    others = [path for path in paths if path != paths[alone]]
    several = Record({2: "two", 3: "three"}[len(others)], others, [Turn(*each) for each in turns])
    return [Record("one", [paths[alone]], [Turn(*one)]), several, Record("text", [], [Turn(*text)])]


def three_records(folder: Path, sizes: Sequence[tuple[int, int]]) -> list[Record]:
    """One image; three of different sizes in two turns; text only."""
    turns = ("<image>\nwhere is the 7?", "left"), ("<image><image>\nand now?", "right")
    return records_of(folder, sizes, ("<image>\nwhere is it?", "the left"), turns, ("where is it?", "there"))


def padded(family: Family, records: list[Record], pad_left: bool = False, generation: bool = False) -> Batch:
    return Collator(family, 1024, "left" if pad_left else "right", generation)(records)


def assembled(
    rows: list[Tensor],
    codes: list[Tensor],
    ranks: list[int],
    pad_left: bool,
    images: list[int],
    pad: int = 0,
    name: str = "sample",
    **more: Any,
) -> Batch:
    """A batch of tokens with their regions, whose answers are labelled; ``ranks`` count in each row, -1 for none."""
    width = max(map(len, rows))
    ids, regions = torch.full((len(rows), width), pad), torch.full((len(rows), width), int(Region.PADDING))
    for i, (row, code) in enumerate(zip(rows, codes, strict=True)):
        start = width - len(row) if pad_left else 0
        ids[i, start : start + len(row)], regions[i, start : start + len(row)] = row, code
        ranks[i] += start if ranks[i] >= 0 else 0
    labels = torch.where(regions == Region.ANSWER, ids, -100)
    counts, names = torch.tensor(images), [f"{name}-{i}" for i in range(len(rows))]
    pixels = more.pop("pixel_values", None)
    return Batch(ids, labels, regions, torch.tensor(ranks), pixels, counts, names, **more)
