"""Scores of answers about digit scenes, in 0..1; those of one's own questions in LLaVA's format, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from subtoken_train.datasets.scenes import COLOR_NAMES, DESCRIPTION_KINDS, PLACES
from subtoken_train.evaluation.metrics.mean_scores import MeanScores


def scene_objects(text: str) -> frozenset[frozenset[str]]:
    """The (place, colour, digit) triples that a scene description names, in either order of the two styles."""
    triples, current = set(), set[str]()
    for word in text.split():
        kind = 0 if word in PLACES else 1 if word in COLOR_NAMES else 2 if word.isdigit() else 3
        if kind == 3:
            current = set()
            continue
        current = {word} if len(current) == 3 or not current else current | {word}
        if len(current) == 3:
            triples.add(frozenset(current))
            current = set()
    return frozenset(triples)


def scene_f1(prediction: str, answer: str) -> float:
    """F1 of the described objects: each counts only with the right place, colour and digit together."""
    found, wanted = scene_objects(prediction), scene_objects(answer)
    if not found or not wanted:
        return float(found == wanted)
    return 2 * len(found & wanted) / (len(found) + len(wanted))


def scene_score(kind: str | None, prediction: str, answer: str) -> float:
    """``scene_f1`` for scene descriptions; for everything else 1 where the texts are equal but for space and case."""
    if kind in DESCRIPTION_KINDS:
        return scene_f1(prediction, answer)
    return float(prediction.strip().lower() == answer.strip().lower())


class SceneScore(MeanScores):
    """``score``: mean of exact match (short answers) or of the F1 of the described objects (descriptions).

    A reference holds ``answer`` and ``kind``.
    """

    names = ("score",)

    @staticmethod
    def figures(prediction: str, reference: Mapping[str, Any]) -> dict[str, float]:
        """The answer's exact match or F1."""
        return {"score": scene_score(reference["kind"], prediction, reference["answer"])}
