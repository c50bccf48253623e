"""GQA's exact match, in LLaVA's and lmms-eval's readings.

Sources: ``scripts/convert_gqa_for_eval.py`` of LLaVA before GQA's own ``eval.py``; metric ``exact_match`` of lmms-eval
with ``ignore_case`` and ``ignore_punctuation``.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

from subtoken_train.evaluation.metrics.mean_scores import MeanScores

_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


class ExactMatch(MeanScores):
    """Answers equal to the one reference.

    A reference holds ``answer``.

    Scores:
        ``accuracy``: LLaVA's: full stops at the end and case do not count; what is stored is already in lower case.
        ``lmms_exact_match``: neither case nor punctuation (ASCII) counts, in the answer and in the reference.
    """

    names = ("accuracy", "lmms_exact_match")

    @staticmethod
    def figures(prediction: str, reference: Mapping[str, Any]) -> dict[str, float]:
        """Both readings of one answer."""
        answer = reference["answer"]
        return {
            "accuracy": float(llava_answer(prediction) == answer),
            "lmms_exact_match": float(_plain(prediction) == _plain(answer)),
        }


def llava_answer(text: str) -> str:
    """What LLaVA hands to GQA's scorer."""
    return text.rstrip(".").lower()


def _plain(text: str) -> str:
    return text.lower().translate(_WITHOUT_PUNCTUATION)
