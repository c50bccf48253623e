"""MathVista's accuracy (Lu et al., ICLR 2024): an answer is extracted, normalised, and compared as text.

The original asks a language model to extract the answer where simple rules fail. Here rules do all of it, so that no
service is needed: an answer in running text may be read differently. Normalising and comparing are the original's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from subtoken_train.evaluation.metrics.anls import levenshtein
from subtoken_train.evaluation.metrics.mean_scores import MeanScores

_SAID = re.compile(r"(?:answer|option|choice)(?:\s+is)?\s*:?\s*\(?([A-Z])\)?(?![\w'])", re.IGNORECASE)
_LEADING = re.compile(r"\(?([A-Z])(?:[.):]|$)")
_NUMBER = re.compile(r"-?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_LIST = re.compile(r"\[[^\[\]]*\]")
_QUOTED = re.compile(r'The answer is "(.*)"\.')


def extract(response: str, choices: Sequence[str] | None, question_type: str, answer_type: str) -> str:
    """What of ``response`` is the answer, by rules; the response itself where none fits.

    In this order: the response is a choice or a number; ``The answer is "..."``. Then for choices a letter that begins
    it ("B.", "(B) ..."), a letter that is said to be the answer, or the one choice it contains; for numbers the last
    number, commas taken out; for lists the last pair of brackets.
    """
    text = response.strip()
    if question_type == "multi_choice":
        return _extract_choice(text, choices or ())
    if _is_number(text, answer_type):
        return text
    if quoted := _QUOTED.search(text):
        return quoted.group(1)
    found = {"integer": _NUMBER, "float": _NUMBER, "list": _LIST}.get(answer_type, _QUOTED).findall(text)
    if not found:
        return text
    last: str = found[-1]
    return last if answer_type == "list" else last.replace(",", "")


def _extract_choice(text: str, choices: Sequence[str]) -> str:
    if text in choices:
        return text
    for pattern in (_QUOTED, _LEADING):
        if match := pattern.match(text):
            return match.group(1)
    if said := _SAID.findall(text):
        return str(said[-1]).upper()
    contained = [choice for choice in choices if choice.lower() in text.lower()]
    return contained[0] if len(contained) == 1 else text


def _is_number(text: str, answer_type: str) -> bool:
    kinds = {"integer": int, "float": float}
    try:
        return answer_type in kinds and kinds[answer_type](text) is not None
    except ValueError:
        return False


def normalise(
    extraction: object,
    choices: Sequence[str] | None,
    question_type: str,
    answer_type: str,
    precision: float | None,
) -> str | None:
    """The extraction in the form that answers have; None where it has no such form.

    A choice is meant by its letter, alone or in brackets, or else is the one at the least edit distance (the first of
    equals): a choice is always found. ``precision`` is the decimals of a ``float`` answer and must be a whole number
    *type*: with 1.0 every such answer is None, as in the original.
    """
    if question_type == "multi_choice":
        return _normalise_choice(str(extraction).strip(), list(choices or ()))
    try:
        if answer_type == "integer":
            return str(int(float(extraction)))  # type: ignore[arg-type]
        if answer_type == "float":
            return str(round(float(extraction), precision))  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return str(extraction) if answer_type == "list" or extraction is not None else None


def _normalise_choice(text: str, choices: list[str]) -> str:
    letters = re.findall(r"\(([a-zA-Z])\)", text)
    letter = letters[0].upper() if letters else text
    place = ord(letter) - ord("A") if len(letter) == 1 else -1
    return choices[place] if 0 <= place < len(choices) else min(choices, key=lambda choice: levenshtein(letter, choice))


def equal(normalised: object, answer: object) -> bool:
    """Whether both are the same text, but for surrounding space."""
    return str(normalised).strip() == str(answer).strip()


def correct(prediction: str, reference: Mapping[str, Any], precision: float | None) -> bool:
    """Whether an answer is right, with a given ``precision`` (see ``normalise``)."""
    kinds = reference["choices"], reference["question_type"], reference["answer_type"]
    return equal(normalise(extract(prediction, *kinds), *kinds, precision), reference["answer"])


class MathVistaAccuracy(MeanScores):
    """Shares of right answers.

    Scores: ``accuracy``; ``lmms_accuracy`` takes the decimals as the Hub's file has them, as 1.0 and 2.0, so that no
    answer of type ``float`` can be right (40 of the 1,000 questions of testmini).

    A reference holds ``choices``, ``question_type``, ``answer_type``, ``precision`` and ``answer``.
    """

    names = ("accuracy", "lmms_accuracy")

    @staticmethod
    def figures(prediction: str, reference: Mapping[str, Any]) -> dict[str, float]:
        """1 or 0, in both readings."""
        decimals = reference["precision"]
        whole, stored = (None, None) if decimals is None else (int(decimals), float(decimals))
        return {
            "accuracy": float(correct(prediction, reference, whole)),
            "lmms_accuracy": float(correct(prediction, reference, stored)),
        }
