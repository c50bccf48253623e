"""VQAv2's accuracy in three readings, which differ in what is normalised before texts are compared.

Source: ``vqaEval.py`` of GT-Vision-Lab/VQA, LLaVA's ``convert_vqav2_for_submission.py``, lmms-eval ``vqav2``. What the
servers' own scorer does with test answers, which are not public, is not done here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from subtoken_train.evaluation.metrics.mean_scores import MeanScores
from subtoken_train.evaluation.metrics.soft_accuracy import leave_one_out
from subtoken_train.evaluation.metrics.vqa_accuracy import (
    OFFICIAL_COMMA,
    evalai_answer,
    one_line,
    plain_words,
    without_marks,
)


class VQAv2Accuracy(MeanScores):
    """Accuracy of answers that ten people answered too.

    Scores:
        ``llava_accuracy``: the official scorer on the prediction as LLaVA submits it, through ``evalai_answer``. What
            tables print: models say "Yes", and people "yes".
        ``official_accuracy``: the official scorer on the bare prediction. It normalises, and so ignores case and
            punctuation, *only where the ten answers are not all the same*: "Yes" among ten "yes" is wrong.
        ``lmms_accuracy``: normalised always, without ``word_tokens``.

    A reference holds ``answers``, a list of texts.
    """

    names = ("llava_accuracy", "official_accuracy", "lmms_accuracy")

    @staticmethod
    def figures(prediction: str, reference: Mapping[str, Any]) -> dict[str, float]:
        """The three accuracies of one answer."""
        people = [one_line(answer) for answer in reference["answers"]]
        lmms = [plain_words(without_marks(answer)) for answer in people]
        return {
            "llava_accuracy": official(evalai_answer(prediction), people),
            "official_accuracy": official(one_line(prediction), people),
            "lmms_accuracy": leave_one_out(plain_words(without_marks(one_line(prediction))), lmms),
        }


def official(answer: str, people: Sequence[str]) -> float:
    """What ``vqaEval.py`` gives one answer, in 0..1.

    Args:
        answer: without line ends, tabs and surrounding space.
        people: likewise.
    """
    if len(set(people)) > 1:
        answer, *people = (plain_words(without_marks(text, OFFICIAL_COMMA)) for text in (answer, *people))
    return leave_one_out(answer, people)
