"""Short answers against texts (how similar, equal, or near as a number), and answers for a judge.

Sources: the DocVQA challenge's ANLS (Biten et al., arXiv:1905.13648, threshold 0.5), as LLaVA's ``m4c_evaluator.py``
(STVQAANLSEvaluator) and lmms-eval's ``anls`` read white space; GQA's exact match by LLaVA's
``scripts/convert_gqa_for_eval.py`` before GQA's own ``eval.py``, and by lmms-eval's ``exact_match`` with
``ignore_case`` and ``ignore_punctuation``; ChartQA's accuracy (Masry et al., arXiv:2203.10244, section 5.1), as coded
in Qwen-VL's and lmms-eval's ``chartqa``.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

from subtoken_train.evaluation.metrics.metric import MeanScores

SIMILAR_ENOUGH = 0.5
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
TOLERANCE = 0.05


class ANLS(MeanScores):
    """The best similarity to any of the reference's ``answers``, 0 where it is below one half.

    ``lmms_anls``: inner white space collapses to single spaces for the distance, which is divided by the longer of the
    two *raw* texts, so that white space around a text raises its score (also Qwen-VL's and VLMEvalKit's rule).
    ``llava_anls``: only the outer white space goes. Two empty texts are equal; its original divides by zero there.
    """

    names = ("lmms_anls", "llava_anls")

    @staticmethod
    def figures(prediction: str, reference: Mapping[str, Any]) -> dict[str, float]:
        answers = reference["answers"]
        return {
            "lmms_anls": max(lmms_similarity(prediction, answer) for answer in answers),
            "llava_anls": max(llava_similarity(prediction, answer) for answer in answers),
        }


def llava_similarity(prediction: str, answer: str) -> float:
    """Return 1 - distance / length, 0 where that is below ``SIMILAR_ENOUGH``."""
    first, second = prediction.lower().strip(), answer.lower().strip()
    return _similarity(first, second, max(len(first), len(second)))


def lmms_similarity(prediction: str, answer: str) -> float:
    """Return ``llava_similarity`` with inner white space collapsed and the length of the raw upper-case texts."""
    first, second = (" ".join(text.lower().split()) for text in (prediction, answer))
    return _similarity(first, second, max(len(prediction.upper()), len(answer.upper())))


def levenshtein(first: str, second: str) -> int:
    """Return the edit distance of two texts (torchmetrics' looks at a beam of 25 cells only)."""
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
    return similarity if similarity >= SIMILAR_ENOUGH else 0.0


class ExactMatch(MeanScores):
    """Answers equal to the reference's ``answer``.

    ``accuracy`` is LLaVA's: full stops at the end and case do not count; what is stored is already in lower case. For
    ``lmms_exact_match`` neither case nor punctuation (ASCII) counts, in both.
    """

    names = ("accuracy", "lmms_exact_match")

    @staticmethod
    def figures(prediction: str, reference: Mapping[str, Any]) -> dict[str, float]:
        answer = reference["answer"]
        return {
            "accuracy": float(gqa_answer(prediction) == answer),
            "lmms_exact_match": float(without_punctuation(prediction) == without_punctuation(answer)),
        }


def gqa_answer(text: str) -> str:
    """Return the answer as LLaVA hands it to GQA's scorer."""
    return text.rstrip(".").lower()


def without_punctuation(text: str) -> str:
    """Lower the text and drop ASCII punctuation."""
    return text.lower().translate(_WITHOUT_PUNCTUATION)


class RelaxedAccuracy(MeanScores):
    """Share of answers that are right by ``relaxed_match``: of all, and of each ``kind`` (human, augmented)."""

    names = ("relaxed_accuracy", "human", "augmented")

    @staticmethod
    def figures(prediction: str, reference: Mapping[str, Any]) -> dict[str, float]:
        right = float(relaxed_match(prediction, reference["answer"]))
        return {"relaxed_accuracy": right, reference["kind"]: right}


def relaxed_match(prediction: str, target: str) -> bool:
    """Tell whether two numbers differ by at most 5 % of the target, or two texts only in case.

    A number is what Python's ``float`` reads, or that before "%", in hundredths; "1,200" and a target of 0 are texts.
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


_FULL_WIDTH = {0x3000: " "} | {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}


class ContainsAnswer(MeanScores):
    """``accuracy``: OCRBench's, the share of answers that contain one of the accepted texts (``answers``).

    Case does not count, and a full-width character is its ASCII one; of formulas (``formula``) case counts, and space
    does not. Source: ``tasks/ocrbench/utils.py`` of lmms-eval.
    """

    names = ("accuracy",)

    @staticmethod
    def figures(prediction: str, reference: Mapping[str, Any]) -> dict[str, float]:
        def read(text: str) -> str:
            text = text.strip().replace("\n", " ")
            return text.replace(" ", "") if reference["formula"] else text.translate(_FULL_WIDTH).lower()

        said = read(prediction)
        return {"accuracy": float(any(read(answer) in said for answer in reference["answers"]))}


class Answered(MeanScores):
    """``answered``: the share of answers that are not empty. It says nothing of their quality: that is a judge's."""

    names = ("answered",)

    @staticmethod
    def figures(prediction: str, reference: Mapping[str, Any]) -> dict[str, float]:
        return {"answered": float(bool(prediction.strip()))}
