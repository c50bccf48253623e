"""Share of facts that were recalled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from subtoken_train.datasets.recall import recall_accuracy
from subtoken_train.evaluation.metrics.base import Prediction
from subtoken_train.evaluation.metrics.mean_score import MeanScore


class RecallScore(MeanScore):
    """Mean over contexts of the share of asked facts that are stated exactly: ``score``."""

    @staticmethod
    def score(prediction: Prediction, reference: Mapping[str, Any]) -> float:
        """The sample's term; reference: ``codes``, name to code."""
        assert isinstance(prediction, str)
        return recall_accuracy(prediction, reference["codes"])
