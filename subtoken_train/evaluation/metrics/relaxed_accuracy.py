"""ChartQA's accuracy: numbers may be off by 5 %.

Source: Masry et al., ChartQA (arXiv:2203.10244), section 5.1, as coded in Qwen-VL's and lmms-eval's ``chartqa``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from subtoken_train.evaluation.metrics.mean_scores import MeanScores

TOLERANCE = 0.05


class RelaxedAccuracy(MeanScores):
    """Share of answers that are right by ``relaxed_match``.

    Scores: ``relaxed_accuracy`` over all, ``human`` and ``augmented`` over the questions of that kind.

    A reference holds ``answer``, a text, and ``kind``, ``human`` or ``augmented``.
    """

    names = ("relaxed_accuracy", "human", "augmented")

    @staticmethod
    def figures(prediction: str, reference: Mapping[str, Any]) -> dict[str, float]:
        """1 or 0, over all and for the question's kind."""
        right = float(relaxed_match(prediction, reference["answer"]))
        return {"relaxed_accuracy": right, reference["kind"]: right}


def relaxed_match(prediction: str, target: str) -> bool:
    """Whether two numbers differ by at most 5 % of the target, or two texts only in case.

    A number is what Python's ``float`` reads, or that before "%", in hundredths: "1,200" is text. A target of 0 is
    compared as text, since nothing is 5 % of it.
    """
    predicted, wanted = _number(prediction), _number(target)
    if predicted is None or not wanted:
        return prediction.lower() == target.lower()
    return abs(predicted - wanted) / abs(wanted) <= TOLERANCE


def _number(text: str) -> float | None:
    percent = text.endswith("%")
    try:
        return float(text.rstrip("%")) / 100 if percent else float(text)
    except ValueError:
        return None
