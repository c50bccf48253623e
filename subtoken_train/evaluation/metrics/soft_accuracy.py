"""Soft accuracy over several people's answers: TextVQA's and VizWiz's.

Source: LLaVA ``m4c_evaluator.py`` (TextVQAAccuracyEvaluator) and lmms-eval ``textvqa`` and ``vizwiz_vqa``, which agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from subtoken_train.evaluation.metrics.mean_scores import MeanScores
from subtoken_train.evaluation.metrics.vqa_accuracy import evalai_answer


def leave_one_out(answer: str, people: Sequence[str]) -> float:
    """Mean over the people of min(1, how many of the *others* gave ``answer`` / 3), with ten people 0, .3, .6, .9 or 1.

    Texts are compared as they are. Nobody answered: 0.
    """
    if not people:
        return 0.0
    same = sum(other == answer for other in people)
    agreed, differed = min(1.0, (same - 1) / 3), min(1.0, same / 3)
    return (same * agreed + (len(people) - same) * differed) / len(people)


class SoftAccuracy(MeanScores):
    """``accuracy``: ``leave_one_out`` of the normalised prediction among the normalised answers.

    A reference holds ``answers``, a list of texts. It gives an answer that is right but unlike the people's nothing.
    """

    names = ("accuracy",)

    @staticmethod
    def figures(prediction: str, reference: Mapping[str, Any]) -> dict[str, float]:
        """The accuracy of one answer."""
        people = [evalai_answer(answer) for answer in reference["answers"]]
        return {"accuracy": leave_one_out(evalai_answer(prediction), people)}
