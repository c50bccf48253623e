"""Scores of answers about digit scenes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from subtoken_train.evaluation.metrics.base import Prediction
from subtoken_train.evaluation.metrics.mean_score import MeanScore
from subtoken_train.evaluation.scoring import score


class SceneScore(MeanScore):
    """Mean of exact match (short answers) and F1 of the described objects (descriptions): ``score``."""

    @staticmethod
    def score(prediction: Prediction, reference: Mapping[str, Any]) -> float:
        """The sample's term; reference: ``answer`` and ``kind``."""
        assert isinstance(prediction, str)
        return score(reference["kind"], prediction, reference["answer"])
