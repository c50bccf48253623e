"""Answers about digit scenes: exact match, F1 of whole objects, and F1 of each attribute alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from subtoken_train.datasets.scenes import COLOR_NAMES, DESCRIPTION_KINDS, PLACES
from subtoken_train.evaluation.metrics.metric import MeanScores

ATTRIBUTES = ("place", "color", "digit")


def scene_objects(text: str) -> frozenset[frozenset[str]]:
    """Return the (place, colour, digit) triples that a scene description names, in either order of the two styles."""
    triples, current = set(), set[str]()
    for word in text.split():
        if word not in PLACES and word not in COLOR_NAMES and not word.isdigit():
            current = set()
            continue
        current = {word} if len(current) == 3 or not current else current | {word}
        if len(current) == 3:
            triples.add(frozenset(current))
            current = set()
    return frozenset(triples)


def scene_f1(prediction: str, answer: str) -> float:
    """Return the F1 of the described objects: each counts only with the right place, colour and digit together."""
    found, wanted = scene_objects(prediction), scene_objects(answer)
    if not found or not wanted:
        return float(found == wanted)
    return 2 * len(found & wanted) / (len(found) + len(wanted))


def is_description(kind: str | None, answer: str) -> bool:
    """Tell whether a reference describes a scene: by its kind and its objects, since other data has such kinds too."""
    return kind in DESCRIPTION_KINDS and bool(scene_objects(answer))


def scene_score(kind: str | None, prediction: str, answer: str) -> float:
    """Return ``scene_f1`` for descriptions; else 1 where the texts are equal but for space and case."""
    if is_description(kind, answer):
        return scene_f1(prediction, answer)
    return float(prediction.strip().lower() == answer.strip().lower())


def scene_attributes(text: str) -> dict[str, Counter[str]]:
    """Return the places, colours and digits that a description names, each with how often: multisets.

    A word counts by itself, whatever stands beside it, so that an object of which two attributes are right, or that an
    answer's end cut off, counts for those. A digit with ``none`` right after it is one that the scene does not have
    (``list`` goes through all ten) and does not count. Both styles are read alike, and order does not matter.
    """
    words = text.split()
    found: dict[str, Counter[str]] = {name: Counter() for name in ATTRIBUTES}
    for word, following in zip(words, [*words, ""][1:], strict=True):
        if word in PLACES:
            found["place"][word] += 1
        elif word in COLOR_NAMES:
            found["color"][word] += 1
        elif word.isdigit() and following != "none":
            found["digit"][word] += 1
    return found


def attribute_f1(prediction: str, answer: str) -> dict[str, float]:
    """Return the F1 of each attribute's multiset: 2 |both| / (|found| + |wanted|), 1 where neither names any.

    A colour that is named twice is matched at most twice. It does not say whether a colour stands at *its* place:
    ``scene_f1`` does.
    """
    found, wanted = scene_attributes(prediction), scene_attributes(answer)
    scores = {}
    for name in ATTRIBUTES:
        total = found[name].total() + wanted[name].total()
        scores[name] = 2 * (found[name] & wanted[name]).total() / total if total else 1.0
    return scores


class SceneScore(MeanScores):
    """``score``: mean of exact match (short answers) or of the F1 of the described objects (descriptions).

    Beside it, over descriptions only: ``place_f1``, ``color_f1`` and ``digit_f1``, see ``attribute_f1``. A reference
    holds ``answer`` and ``kind``.
    """

    names = ("score", *(f"{name}_f1" for name in ATTRIBUTES))

    @staticmethod
    def figures(prediction: str, reference: Mapping[str, Any]) -> dict[str, float]:
        kind, answer = reference["kind"], reference["answer"]
        figures = {"score": scene_score(kind, prediction, answer)}
        if is_description(kind, answer):
            figures |= {f"{name}_f1": f1 for name, f1 in attribute_f1(prediction, answer).items()}
        return figures
