"""Scores of one generated answer, in 0..1."""

from __future__ import annotations

from subtoken_train.datasets.scenes import COLOR_NAMES, DESCRIPTION_KINDS, PLACES


def exact_match(prediction: str, answer: str) -> float:
    """1 where the texts are equal but for surrounding space and case."""
    return float(prediction.strip().lower() == answer.strip().lower())


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


def score(kind: str | None, prediction: str, answer: str) -> float:
    """``scene_f1`` for scene descriptions, ``exact_match`` for everything else."""
    return (scene_f1 if kind in DESCRIPTION_KINDS else exact_match)(prediction, answer)
