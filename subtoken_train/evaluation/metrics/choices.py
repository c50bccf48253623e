"""Multiple choice by a letter in a free answer: MMBench with its rotations (Liu et al., arXiv:2307.06281), ScienceQA.

MMBench's letters are read in ``named_letters``. Sources for ScienceQA: ``llava/eval/eval_science_qa.py`` of LLaVA-1.5,
``tasks/scienceqa/utils.py`` of lmms-eval.

Legend: N samples, G questions, R readings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from subtoken_train.evaluation.metrics.metric import GroupedMetric, MeanScores, Prediction, bits_of, groups_of
from subtoken_train.evaluation.metrics.named_letters import LETTERS, READINGS, plain_letter

_SENTENCE = re.compile(r"The answer is ([A-Z]).")  # the last point stands for any character, as in the original
ROTATION = 1_000_000
"""Rows of one question have the same index modulo this."""


class MMBenchScores(GroupedMetric):
    """Accuracy over all rows, and over questions whose rotations are all answered right.

    A reference holds ``index``, ``answer`` (a letter), ``options`` (texts by letter) and, where the question has fewer
    options than four, ``nan_options``: the letters that the Hub's file gives the text "nan". lmms-eval asks without
    them and then reads answers with them, so "banana" may name one; only the ``lmms_`` readings do so here.

    Scores, each with the prefix of its reading (none: ``plain_letter``; ``lmms_``, ``lmms_static_``, ``vlmevalkit_``):
        ``accuracy``: vanilla, over all rows, rotations included. That the sub-token paper prints this is a reading: its
            figures are whole numbers of 4,329 rows, and it names no score.
        ``unrotated_accuracy``: over the rows whose index is below one million, one of each question; what VLMEvalKit
            calls vanilla. Left out where there is no such row.
        ``circular``: questions all of whose rows are right. Left out where no question has two rows. A limited run may
            lack rotations (how many a question has is not known: some have fewer than options), so its figure is high.

    No judge is asked and no letter is drawn: an answer that names no option is wrong. So of
    lmms-eval's tasks ``mmbench_en_dev_static`` gives ``lmms_static_circular``, and ``mmbench_en_dev`` gives
    ``lmms_circular`` and what its judge adds.
    """

    @staticmethod
    def marked(prediction: str, reference: Mapping[str, Any]) -> tuple[int, int]:
        """The question; whether each reading is right, and whether the row is not rotated."""
        options, answer = reference["options"], reference["answer"]
        lmms_options = {**options, **dict.fromkeys(reference.get("nan_options", ()), "nan")}
        marks = [
            read(prediction, lmms_options if name.startswith("lmms_") else options) == answer
            for name, read in READINGS.items()
        ]
        marks.append(reference["index"] < ROTATION)
        return reference["index"] % ROTATION, sum(mark << i for i, mark in enumerate(marks))

    def compute(self) -> dict[str, Tensor]:
        """Scores by name."""
        keys_N, marks_N = self.kept()
        right_NR, unrotated_N = bits_of(marks_N, len(READINGS)), marks_N >> len(READINGS) == 1
        groups = groups_of(keys_N, right_NR)
        right = {"accuracy": right_NR}
        if unrotated_N.any():
            right["unrotated_accuracy"] = right_NR[unrotated_N]
        if (groups.sizes_G > 1).any():
            right["circular"] = groups.all_GM
        means = {score: marks.double().mean(dim=0) for score, marks in right.items()}
        return {f"{name}{score}": mean_R[i] for score, mean_R in means.items() for i, name in enumerate(READINGS)}

    @staticmethod
    def score(prediction: Prediction, reference: Mapping[str, Any]) -> float:
        """The row's term of ``accuracy``."""
        assert isinstance(prediction, str)
        return float(plain_letter(prediction, reference["options"]) == reference["answer"])


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
    """The letter that LLaVA finds: alone, before ". " at the start, or in the one "The answer is X."; else None.

    Space or a line break before or after a letter hides it, as in the original, whose model strips its answers first.
    """
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
    """lmms-eval's rule: the letter in either case, or a text that starts with it and a full stop.

    Space and line breaks around the text do not count, unlike in LLaVA's program (``llava_letter``).
    """
    text = text.strip()
    return text.lower() == letter.lower() or text[:2] == f"{letter}."
