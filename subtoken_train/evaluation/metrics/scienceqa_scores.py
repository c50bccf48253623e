"""ScienceQA's accuracy: the letter that a free answer names, in the readings of LLaVA-1.5 and lmms-eval.

Sources: ``llava/eval/eval_science_qa.py`` of LLaVA-1.5, ``tasks/scienceqa/utils.py`` of lmms-eval.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from subtoken_train.evaluation.metrics.metric import MeanScores
from subtoken_train.evaluation.metrics.named_letters import LETTERS

_SENTENCE = re.compile(r"The answer is ([A-Z]).")  # the last point stands for any character, as in the original


class ScienceQAScores(MeanScores):
    """Chosen letters.

    A reference holds ``answer`` (index of the right choice), ``choices`` (their number) and ``image`` (true, false).

    Scores:
        ``accuracy``: LLaVA's reading, over all samples.
        ``llava_image_accuracy``: over the samples with an image, LLaVA's "IMG-Accuracy".
        ``lmms_accuracy``: lmms-eval's reading.

    A sample that was never answered is no sample here, while LLaVA's program counts it as wrong and without an image.
    """

    names = ("accuracy", "llava_image_accuracy", "lmms_accuracy")

    @staticmethod
    def figures(prediction: str, reference: Mapping[str, Any]) -> dict[str, float]:
        """The readings of one answer."""
        answer = reference["answer"]
        right = float(llava_choice(prediction, reference["choices"]) == answer)
        of_image = {"llava_image_accuracy": right} if reference["image"] else {}
        return {"accuracy": right, **of_image, "lmms_accuracy": float(lmms_right(prediction, LETTERS[answer]))}


def llava_letter(text: str) -> str | None:
    """The letter that LLaVA finds: alone, before ". " at the start, or in the one "The answer is X."; else None."""
    if text in tuple(LETTERS):
        return text
    if len(text) >= 3 and text[0] in LETTERS and text[1:3] == ". ":
        return text[0]
    found: list[str] = _SENTENCE.findall(text)
    return found[0] if len(found) == 1 else None


def llava_choice(text: str, choices: int) -> int:
    """Index of the choice that LLaVA reads; -1 where there is no such letter or choice."""
    letter = llava_letter(text)
    return LETTERS[:choices].find(letter) if letter else -1


def lmms_right(text: str, letter: str) -> bool:
    """lmms-eval's rule: the letter in either case, or a text that starts with it and a full stop."""
    return text.strip().lower() == letter.lower() or (text[:1].isupper() and text[1:2] == "." and text[0] == letter)
