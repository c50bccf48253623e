"""Questions about digit scenes, and their answers in the embedded model's words.

Their kinds follow the styles of the benchmarks of the paper: existence (POPE), reading at a place (TextVQA), colour,
place and count (GQA, MME), multiple choice (MMBench), description (captioning).
"""

from __future__ import annotations

import numpy as np

from subtoken_train.datasets.scenes import COLOR_NAMES, COLORS, GRID, PLACES, SceneObject
from subtoken_train.errors import unknown_name

Objects = tuple[SceneObject, ...]
OPTION_LETTERS = ("A", "B", "C")
SHORT_KINDS = ("exists", "exists_color", "color", "read", "where", "count", "choice")
DESCRIPTION_KINDS = ("describe", "list")
KINDS = SHORT_KINDS + DESCRIPTION_KINDS
PRETRAINING_KINDS = ("list_color", "exists_color_easy")
"""Asked only while the embedded model is pre-trained."""


def describe_scene(objects: Objects) -> str:
    """Raster-order description, ``B3 red 7 C1 blue 2``."""
    return " ".join(f"{item.place} {item.color_name} {item.digit}" for item in objects)


def list_digits(objects: Objects) -> str:
    """Every digit from 0 to 9 with colour and place, or ``none``: ``0 none 1 red B3 2 none ...``."""
    found = {item.digit: item for item in objects}
    return " ".join(
        f"{digit} {found[digit].color_name} {found[digit].place}" if digit in found else f"{digit} none"
        for digit in range(10)
    )


def list_colors(objects: Objects) -> str:
    """Every colour with its count and its places, ``red 2 B3 C1 green 0 ...``; teaches addressing by colour."""
    places = {name: [item.place for item in objects if item.color_name == name] for name in COLOR_NAMES}
    return " ".join(" ".join([name, str(len(found)), *found]) for name, found in places.items())


def ask(rng: np.random.Generator, objects: Objects, kind: str) -> tuple[str, str]:
    """Draw one (question, answer) of ``kind`` (one of KINDS, or PRETRAINING_KINDS) about a scene's objects."""
    some = objects[int(rng.integers(len(objects)))]
    if kind in _LISTINGS:
        question, answer = _LISTINGS[kind]
        return question, answer(objects)
    if kind not in _QUESTIONS:
        raise unknown_name("question kind", kind, KINDS)
    return _QUESTIONS[kind](rng, objects, some)


def _absent(objects: Objects) -> list[int]:
    return sorted(set(range(10)) - {item.digit for item in objects})


def _exists(rng: np.random.Generator, objects: Objects, some: SceneObject) -> tuple[str, str]:
    absent = _absent(objects)
    digit = some.digit if rng.random() < 0.5 else int(rng.choice(absent))
    return f"is there a {digit} ?", "no" if digit in absent else "yes"


def _exists_color(rng: np.random.Generator, objects: Objects, some: SceneObject) -> tuple[str, str]:
    return _of_color(rng, some, [color for color in range(len(COLORS)) if color != some.color])


def _exists_color_easy(rng: np.random.Generator, objects: Objects, some: SceneObject) -> tuple[str, str]:
    """Like ``exists_color``, but where the answer is no, no digit of the scene has the colour (if one is left)."""
    unused = sorted(set(range(len(COLORS))) - {item.color for item in objects})
    return _of_color(rng, some, unused or list(set(range(len(COLORS))) - {some.color}))


def _of_color(rng: np.random.Generator, some: SceneObject, others: list[int]) -> tuple[str, str]:
    color = some.color if rng.random() < 0.5 else int(rng.choice(others))
    return f"is there a {COLOR_NAMES[color]} {some.digit} ?", "yes" if color == some.color else "no"


def _color(rng: np.random.Generator, objects: Objects, some: SceneObject) -> tuple[str, str]:
    return f"what color is the {some.digit} ?", some.color_name


def _read(rng: np.random.Generator, objects: Objects, some: SceneObject) -> tuple[str, str]:
    cell = some.cell if rng.random() < 0.85 else int(rng.integers(GRID * GRID))
    found = [item for item in objects if item.cell == cell]
    return f"what is at {PLACES[cell]} ?", f"{found[0].color_name} {found[0].digit}" if found else "none"


def _where(rng: np.random.Generator, objects: Objects, some: SceneObject) -> tuple[str, str]:
    return f"where is the {some.digit} ?", some.place


def _count(rng: np.random.Generator, objects: Objects, some: SceneObject) -> tuple[str, str]:
    color = some.color if rng.random() < 0.8 else int(rng.integers(len(COLORS)))
    return f"how many {COLOR_NAMES[color]} ?", str(sum(item.color == color for item in objects))


def _choice(rng: np.random.Generator, objects: Objects, some: SceneObject) -> tuple[str, str]:
    wrong = rng.permutation(_absent(objects))[: len(OPTION_LETTERS) - 1].tolist()
    options = rng.permutation([some.digit, *wrong]).tolist()
    listed = " ".join(f"{letter} {digit}" for letter, digit in zip(OPTION_LETTERS, options, strict=False))
    return f"which is there ? {listed}", OPTION_LETTERS[options.index(some.digit)]


_LISTINGS = {
    "describe": ("describe .", describe_scene),
    "list": ("list .", list_digits),
    "list_color": ("list color .", list_colors),
}
_QUESTIONS = {
    "exists": _exists,
    "exists_color": _exists_color,
    "exists_color_easy": _exists_color_easy,
    "color": _color,
    "read": _read,
    "where": _where,
    "count": _count,
    "choice": _choice,
}


def vocabulary() -> tuple[str, ...]:
    """Every word that questions, answers and the chat template use, in a fixed order (no special tokens)."""
    words = "USER: ASSISTANT: ? . what where which is at there a the how many describe list none yes no color"
    return (*words.split(), *OPTION_LETTERS, *map(str, range(10)), *COLOR_NAMES, *PLACES)
