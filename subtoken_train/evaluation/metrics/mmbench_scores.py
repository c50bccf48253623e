"""MMBench (Liu et al., arXiv:2307.06281): accuracy over rows, and over questions with all their rotations.

Legend: N samples, G questions, R readings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from subtoken_train.evaluation.metrics.metric import GroupedMetric, Prediction, bits_of, groups_of
from subtoken_train.evaluation.metrics.named_letters import READINGS, plain_letter

ROTATION = 1_000_000
"""Rows of one question have the same index modulo this."""


class MMBenchScores(GroupedMetric):
    """Accuracy over all rows, and over questions whose rotations are all answered right.

    A reference holds ``index``, ``answer`` (a letter) and ``options`` (texts by letter).

    Scores, each with the prefix of its reading (none: ``plain_letter``; ``lmms_``, ``lmms_static_``, ``vlmevalkit_``):
        ``accuracy``: vanilla, over all rows, rotations included (what the paper prints).
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
        marks = [*(read(prediction, options) == answer for read in READINGS.values()), reference["index"] < ROTATION]
        return reference["index"] % ROTATION, sum(mark << i for i, mark in enumerate(marks))

    def compute(self) -> dict[str, Tensor]:
        """Scores by name."""
        keys_N, marks_N = self.kept()
        right_NR, unrotated_N = bits_of(marks_N, len(READINGS)), marks_N >> len(READINGS) == 1
        accuracy_R = right_NR.double().mean(dim=0)
        scores = {f"{name}accuracy": accuracy_R[i] for i, name in enumerate(READINGS)}
        if unrotated_N.any():
            unrotated_R = right_NR[unrotated_N].double().mean(dim=0)
            scores |= {f"{name}unrotated_accuracy": unrotated_R[i] for i, name in enumerate(READINGS)}
        groups = groups_of(keys_N, right_NR)
        if (groups.sizes_G > 1).any():
            circular_R = groups.all_GM.double().mean(dim=0)
            scores |= {f"{name}circular": circular_R[i] for i, name in enumerate(READINGS)}
        return scores

    @staticmethod
    def score(prediction: Prediction, reference: Mapping[str, Any]) -> float:
        """The row's term of ``accuracy``."""
        assert isinstance(prediction, str)
        return float(plain_letter(prediction, reference["options"]) == reference["answer"])
