"""For benchmarks that only a judge can score: how much was answered, and nothing of how well."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from subtoken_train.evaluation.metrics.mean_scores import MeanScores


class Answered(MeanScores):
    """``answered``: the share of answers that are not empty. It says nothing of their quality: that is a judge's."""

    names = ("answered",)

    @staticmethod
    def figures(prediction: str, reference: Mapping[str, Any]) -> dict[str, float]:
        """1 where there is an answer."""
        return {"answered": float(bool(prediction.strip()))}
