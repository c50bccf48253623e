"""Scores of answers about digit scenes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from subtoken_train.evaluation.metrics.mean_scores import MeanScores
from subtoken_train.evaluation.scoring import score


class SceneScore(MeanScores):
    """``score``: mean of exact match (short answers) or of the F1 of the described objects (descriptions).

    A reference holds ``answer`` and ``kind``.
    """

    names = ("score",)

    @staticmethod
    def figures(prediction: str, reference: Mapping[str, Any]) -> dict[str, float]:
        """The answer's exact match or F1."""
        return {"score": score(reference["kind"], prediction, reference["answer"])}
