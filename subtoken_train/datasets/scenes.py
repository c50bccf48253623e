"""Digit scenes: the embedded visual question answering world, its pictures, its questions and its files.

A scene is a 96 x 96 image: a 4 x 4 grid, 4 to 9 of whose cells hold a *different* handwritten digit (UCI "Optical
Recognition of Handwritten Digits", disjoint originals in each split) in one of six colours, over clutter. Questions
follow the paper's benchmarks: existence (POPE), reading (TextVQA), colour, place, count (GQA, MME), choice, captions.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from subtoken_train.artifact.whole_folder import FolderKind, whole_folder
from subtoken_train.datasets.record_format import IMAGE_PLACEHOLDER
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
_DESCRIPTION_SHARE = 0.3  # of training questions: 15 % describe, 15 % list
_DESCRIPTION_EVERY = 10  # records, in dev and test
_SCENES = FolderKind("a folder of scenes", "subtoken-train data scenes")


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
    """Return, per split and digit, the alpha masks [n, 20, 20] in 0..1 of that split's handwritten originals."""
    with np.load(resource("data/digits/digits.npz")) as archive:
        images, labels = archive["images"].astype(np.float32) / 16.0, archive["labels"]
    places = np.arange(images.shape[-1])
    centres = (np.arange(DIGIT) + 0.5) * len(places) / DIGIT - 0.5
    weights = np.stack([np.interp(centres, places, one) for one in np.eye(len(places))], 1).astype(np.float32)
    glyphs = weights @ images @ weights.T
    order = np.random.RandomState(0).permutation(len(labels))
    bounds = {"train": order[:1200], "dev": order[1200:1500], "test": order[1500:]}
    return {split: [glyphs[ids[labels[ids] == digit]] for digit in range(10)] for split, ids in bounds.items()}


def draw_scene(rng: np.random.Generator, split: str) -> Scene:
    """Draw one scene with digits of ``split`` (``train`` | ``dev`` | ``test``)."""
    count = int(rng.integers(4, 10))
    cells, digits = rng.permutation(GRID * GRID)[:count], rng.permutation(10)[:count]
    objects = sorted(zip(cells.tolist(), digits.tolist(), rng.integers(0, len(COLORS), count).tolist(), strict=True))
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


Objects = tuple[SceneObject, ...]
OPTION_LETTERS = ("A", "B", "C")
SHORT_KINDS: tuple[str, ...] = ("exists", "exists_color", "color", "read", "where", "count", "choice")
DESCRIPTION_KINDS: tuple[str, ...] = ("describe", "list")
KINDS = SHORT_KINDS + DESCRIPTION_KINDS


def ask(rng: np.random.Generator, objects: Objects, kind: str) -> tuple[str, str]:
    """Draw one (question, answer) of ``kind`` (one of KINDS) about a scene's objects."""
    some = objects[int(rng.integers(len(objects)))]
    if kind in DESCRIPTION_KINDS:
        found = {item.digit: f"{item.color_name} {item.place}" for item in objects}
        described = " ".join(f"{item.place} {item.color_name} {item.digit}" for item in objects)  # B3 red 7 C1 blue 2
        listed = " ".join(f"{digit} {found.get(digit, 'none')}" for digit in range(10))  # 0 none 1 red B3 2 none ...
        return f"{kind} .", described if kind == "describe" else listed
    return _QUESTIONS[kind](rng, objects, some)


def _absent(objects: Objects) -> list[int]:
    return sorted(set(range(10)) - {item.digit for item in objects})


def _exists(rng: np.random.Generator, objects: Objects, some: SceneObject) -> tuple[str, str]:
    absent = _absent(objects)
    digit = some.digit if rng.random() < 0.5 else int(rng.choice(absent))
    return f"is there a {digit} ?", "no" if digit in absent else "yes"


def asked_color(rng: np.random.Generator, some: SceneObject, others: list[int]) -> tuple[str, str]:
    """Ask whether a digit has its own colour, or one of others."""
    color = some.color if rng.random() < 0.5 else int(rng.choice(others))
    return f"is there a {COLOR_NAMES[color]} {some.digit} ?", "yes" if color == some.color else "no"


def _read(rng: np.random.Generator, objects: Objects, some: SceneObject) -> tuple[str, str]:
    cell = some.cell if rng.random() < 0.85 else int(rng.integers(GRID * GRID))
    found = [item for item in objects if item.cell == cell]
    return f"what is at {PLACES[cell]} ?", f"{found[0].color_name} {found[0].digit}" if found else "none"


def _count(rng: np.random.Generator, objects: Objects, some: SceneObject) -> tuple[str, str]:
    color = some.color if rng.random() < 0.8 else int(rng.integers(len(COLORS)))
    return f"how many {COLOR_NAMES[color]} ?", str(sum(item.color == color for item in objects))


def _choice(rng: np.random.Generator, objects: Objects, some: SceneObject) -> tuple[str, str]:
    wrong = rng.permutation(_absent(objects))[: len(OPTION_LETTERS) - 1].tolist()
    options = rng.permutation([some.digit, *wrong]).tolist()
    listed = " ".join(f"{letter} {digit}" for letter, digit in zip(OPTION_LETTERS, options, strict=False))
    return f"which is there ? {listed}", OPTION_LETTERS[options.index(some.digit)]


_QUESTIONS: dict[str, Callable[[np.random.Generator, Objects, SceneObject], tuple[str, str]]] = {
    "exists": _exists,
    "exists_color": lambda rng, _, some: asked_color(rng, some, [at for at in range(len(COLORS)) if at != some.color]),
    "color": lambda rng, _, some: (f"what color is the {some.digit} ?", some.color_name),
    "read": _read,
    "where": lambda rng, _, some: (f"where is the {some.digit} ?", some.place),
    "count": _count,
    "choice": _choice,
}


def write_scenes(
    folder: str | Path, *, train: int = 12800, dev: int = 800, test: int = 4800, seed: int = 0, overwrite: bool = False
) -> None:
    """Write so many records of the splits, whole or not at all; ``overwrite`` renames an old folder to ``NAME.1``."""
    with whole_folder(Path(folder), overwrite, _SCENES) as partial:
        for split, count in zip(SPLITS, (train, dev, test), strict=True):
            write_scene_split(partial, split, count, seed)
            print(f"{split}: {count} records")


def write_scene_split(folder: Path, split: str, count: int, seed: int) -> None:
    """Write ``<folder>/<split>.json`` and ``<folder>/<split>/000000.jpg`` and on: one image and question per record.

    Training kinds are drawn (15 % describe, 15 % list, the rest even); in dev and test every tenth record is a
    description and the rest cycle through the short kinds.
    """
    (folder / split).mkdir(parents=True, exist_ok=True)
    records = []
    for index in range(count):
        rng = np.random.default_rng([seed, SPLITS.index(split), index])
        block, place = divmod(index, _DESCRIPTION_EVERY)
        kinds, number = SHORT_KINDS, block * (_DESCRIPTION_EVERY - 1) + place
        if place == _DESCRIPTION_EVERY - 1:
            kinds, number = DESCRIPTION_KINDS, block
        if split == "train":
            kinds = DESCRIPTION_KINDS if rng.random() < _DESCRIPTION_SHARE else SHORT_KINDS
            number = int(rng.integers(len(kinds)))
        kind = kinds[number % len(kinds)]
        scene = draw_scene(rng, split)
        question, answer = ask(rng, scene.objects, kind)
        name = f"{split}/{index:06d}.jpg"
        Image.fromarray(scene.pixels).save(folder / name, quality=90, subsampling=0)
        turns = [("human", f"{IMAGE_PLACEHOLDER}\n{question}"), ("gpt", answer)]
        conversations = [{"from": role, "value": value} for role, value in turns]
        records.append({"id": f"{split}-{index:06d}", "image": name, "kind": kind, "conversations": conversations})
    (folder / f"{split}.json").write_text(json.dumps(records, indent=1), encoding="utf-8")
