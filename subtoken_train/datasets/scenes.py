"""Digit scenes: the embedded visual question answering world.

A scene is a 96 x 96 image: a 4 x 4 grid of 24-pixel cells, 4 to 9 of which hold a *different* handwritten digit
(UCI "Optical Recognition of Handwritten Digits", 8 x 8 originals) in one of six colours, over clutter strokes and
noise. Digits of the train, dev and test splits come from disjoint originals. Everything is a pure function of the
random generator that is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from subtoken_train.errors import unknown_name
from subtoken_train.resources import resource

GRID, CELL, DIGIT = 4, 24, 20
IMAGE_SIZE = GRID * CELL
COLORS: dict[str, tuple[float, float, float]] = {
    "red": (1.0, 0.15, 0.15),
    "green": (0.1, 0.85, 0.2),
    "blue": (0.2, 0.35, 1.0),
    "yellow": (1.0, 0.9, 0.1),
    "purple": (0.75, 0.2, 0.9),
    "white": (1.0, 1.0, 1.0),
}
COLOR_NAMES = tuple(COLORS)
PLACES = tuple(f"{row}{column}" for row in "ABCD" for column in range(1, 5))
SPLITS = ("train", "dev", "test")


@dataclass(frozen=True)
class SceneObject:
    """One digit of a scene: ``cell`` in raster order (0..15), ``digit`` (0..9), ``color`` (index into COLOR_NAMES)."""

    cell: int
    digit: int
    color: int

    @property
    def place(self) -> str:
        """The cell's name, ``A1`` (top left) to ``D4`` (bottom right)."""
        return PLACES[self.cell]

    @property
    def color_name(self) -> str:
        """The colour's word."""
        return COLOR_NAMES[self.color]


@dataclass(frozen=True)
class Scene:
    """A rendered scene: ``pixels`` uint8 [96, 96, 3] and its objects in raster order."""

    pixels: npt.NDArray[np.uint8]
    objects: tuple[SceneObject, ...]


@lru_cache(maxsize=1)
def _glyphs() -> dict[str, list[npt.NDArray[np.float32]]]:
    """Per split and digit: the alpha masks [n, 20, 20] in 0..1 of that split's handwritten originals."""
    with np.load(resource("data/digits/digits.npz")) as archive:
        images, labels = archive["images"].astype(np.float32) / 16.0, archive["labels"]
    weights = _bilinear_weights(images.shape[-1], DIGIT)
    glyphs = weights @ images @ weights.T
    order = np.random.RandomState(0).permutation(len(labels))
    bounds = {"train": order[:1200], "dev": order[1200:1500], "test": order[1500:]}
    return {split: [glyphs[ids[labels[ids] == digit]] for digit in range(10)] for split, ids in bounds.items()}


def _bilinear_weights(size_in: int, size_out: int) -> npt.NDArray[np.float32]:
    """Row-stochastic matrix [size_out, size_in] that resizes one axis bilinearly (half-pixel centres)."""
    centre = np.clip((np.arange(size_out) + 0.5) * size_in / size_out - 0.5, 0, size_in - 1)
    low = np.floor(centre).astype(int)
    high = np.minimum(low + 1, size_in - 1)
    weights = np.zeros((size_out, size_in), np.float32)
    weights[np.arange(size_out), low] += 1 - (centre - low)
    weights[np.arange(size_out), high] += centre - low
    return weights


def draw_scene(rng: np.random.Generator, split: str) -> Scene:
    """Draw one scene with digits of ``split`` (``train`` | ``dev`` | ``test``)."""
    if split not in SPLITS:
        raise unknown_name("split", split, SPLITS)
    count = int(rng.integers(4, 10))
    cells, digits = rng.permutation(GRID * GRID)[:count], rng.permutation(10)[:count]
    colors = rng.integers(0, len(COLORS), count)
    objects = sorted(zip(cells.tolist(), digits.tolist(), colors.tolist(), strict=True))
    canvas = np.empty((IMAGE_SIZE, IMAGE_SIZE, 3), np.float32)
    canvas[:] = rng.uniform(0, 0.25, 3)
    for _ in range(10):  # clutter strokes, two pixels thick
        x, y = rng.integers(0, IMAGE_SIZE - 6, 2)
        length = int(rng.integers(2, 10))
        width, height = (length, 2) if rng.random() < 0.5 else (2, length)
        canvas[y : y + height, x : x + width] = rng.uniform(0, 0.6, 3)
    for cell, digit, color in objects:
        shapes = _glyphs()[split][digit]
        alpha = shapes[rng.integers(len(shapes))][..., None]
        jitter_y, jitter_x = rng.integers(0, CELL - DIGIT + 1, 2)
        top, left = cell // GRID * CELL + jitter_y, cell % GRID * CELL + jitter_x
        patch = canvas[top : top + DIGIT, left : left + DIGIT]
        patch[:] = patch * (1 - alpha) + alpha * np.array(COLORS[COLOR_NAMES[color]], np.float32)
    canvas += rng.standard_normal(canvas.shape, np.float32) * np.float32(0.015)
    pixels = np.clip(canvas * 255 + 0.5, 0, 255).astype(np.uint8)
    return Scene(pixels, tuple(SceneObject(*triple) for triple in objects))
