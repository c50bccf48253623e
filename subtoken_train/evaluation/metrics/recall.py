"""Share of facts that were recalled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from subtoken_train.datasets.recall import recall_accuracy
from subtoken_train.evaluation.metrics.mean_scores import MeanScores


class RecallScore(MeanScores):
    """``score``: mean over contexts of the share of asked facts that are stated exactly.

    A reference holds ``codes``, name to code.
    """

    names = ("score",)

    @staticmethod
    def figures(prediction: str, reference: Mapping[str, Any]) -> dict[str, float]:
        """The context's share."""
        return {"score": recall_accuracy(prediction, reference["codes"])}
