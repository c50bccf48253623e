"""Average normalised Levenshtein similarity of document questions, in two readings of white space.

Source: the DocVQA challenge's rule (Biten et al., arXiv:1905.13648, threshold 0.5); ``llava_anls`` as LLaVA's
``m4c_evaluator.py`` (STVQAANLSEvaluator), ``lmms_anls`` as lmms-eval's metric ``anls``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from subtoken_train.evaluation.metrics.mean_scores import MeanScores

THRESHOLD = 0.5


class ANLS(MeanScores):
    """The best similarity to any of the references, 0 where it is below one half.

    Scores:
        ``lmms_anls``: inner white space collapses to single spaces for the distance, which is divided by the longer of
            the two *raw* texts. So white space around a text raises its score. What tables print: it is also the rule
            of Qwen-VL and VLMEvalKit.
        ``llava_anls``: only the outer white space goes, for distance and length. Its original divides by zero where
            both texts are empty; here they are equal texts, 1, as in ``lmms_anls``.

    A reference holds ``answers``, a list of texts with at least one.
    """

    names = ("lmms_anls", "llava_anls")

    @staticmethod
    def figures(prediction: str, reference: Mapping[str, Any]) -> dict[str, float]:
        """The two similarities of one answer."""
        answers = reference["answers"]
        return {
            "lmms_anls": max(lmms_similarity(prediction, answer) for answer in answers),
            "llava_anls": max(llava_similarity(prediction, answer) for answer in answers),
        }


def llava_similarity(prediction: str, answer: str) -> float:
    """1 - distance / length, 0 where that is below ``THRESHOLD``."""
    first, second = prediction.lower().strip(), answer.lower().strip()
    return _similarity(first, second, max(len(first), len(second)))


def lmms_similarity(prediction: str, answer: str) -> float:
    """As ``llava_similarity``, with inner white space collapsed and the length of the raw upper-case texts."""
    first, second = (" ".join(text.lower().split()) for text in (prediction, answer))
    return _similarity(first, second, max(len(prediction.upper()), len(answer.upper())))


def levenshtein(first: str, second: str) -> int:
    """The fewest insertions, deletions and substitutions of characters that make one text the other.

    Written out because torchmetrics' edit distance looks at a beam of 25 cells only.
    """
    row = list(range(len(second) + 1))
    for i, character in enumerate(first, start=1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(second, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (character != other))
    return row[-1]


def _similarity(first: str, second: str, length: int) -> float:
    if length == 0:
        return 1.0
    similarity = 1 - levenshtein(first, second) / length
    return similarity if similarity >= THRESHOLD else 0.0
