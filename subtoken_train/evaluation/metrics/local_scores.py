"""Scores of one's own questions: each names its own rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from subtoken_train.evaluation.metrics.metric import MeanScores
from subtoken_train.evaluation.metrics.short_answers import lmms_similarity, relaxed_match
from subtoken_train.evaluation.metrics.vqa_accuracy import evalai_answer, leave_one_out


def _exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1 where the prediction is an answer, but for case, surrounding space and full stops at the end."""
    return float(_plain(prediction) in map(_plain, answers))


def _contains(prediction: str, answers: Sequence[str]) -> float:
    """1 where an answer is a part of the prediction, in any case."""
    return float(any(answer.lower() in prediction.lower() for answer in answers))


def _relaxed(prediction: str, answers: Sequence[str]) -> float:
    """1 where the prediction is within 5 % of an answer that is a number, or equals one; see ``relaxed_match``."""
    return float(any(relaxed_match(prediction, answer) for answer in answers))


def _anls(prediction: str, answers: Sequence[str]) -> float:
    """The best similarity to an answer, see ``lmms_similarity``."""
    return max(lmms_similarity(prediction, answer) for answer in answers)


def _vqa(prediction: str, answers: Sequence[str]) -> float:
    """``leave_one_out`` of normalised texts: answers are those of several people, usually ten."""
    return leave_one_out(evalai_answer(prediction), [evalai_answer(answer) for answer in answers])


RULES: dict[str, Callable[[str, Sequence[str]], float]] = {
    "exact_match": _exact_match,
    "contains": _contains,
    "relaxed": _relaxed,
    "anls": _anls,
    "vqa": _vqa,
}


class LocalScores(MeanScores):
    """``score``, the mean over all samples, and the mean by each rule that some sample names.

    A reference holds ``answers``, a list of texts with at least one, and ``metric``, one of ``RULES``.
    """

    names = ("score", *RULES)

    @staticmethod
    def figures(prediction: str, reference: Mapping[str, Any]) -> dict[str, float]:
        """The score by the sample's own rule."""
        value = RULES[reference["metric"]](prediction, reference["answers"])
        return {"score": value, reference["metric"]: value}


def _plain(text: str) -> str:
    return text.strip().rstrip(".").strip().lower()
