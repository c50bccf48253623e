"""MME's yes/no questions (Fu et al., arXiv:2306.13394), in the readings of its own program and of lmms-eval.

Sources: ``eval_tool/calculation.py`` of MME, ``tasks/mme/utils.py`` of lmms-eval.

Legend: N samples, G pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from subtoken_train.evaluation.metrics.metric import GroupedMetric, Prediction, bits_of, group_key, groups_of

MME_PERCEPTION = (
    "existence", "count", "position", "color", "posters", "celebrity", "scene", "landmark", "artwork", "OCR",
)  # fmt: skip
MME_COGNITION = ("commonsense_reasoning", "numerical_calculation", "text_translation", "code_reasoning")
MME_SUBTASKS = MME_PERCEPTION + MME_COGNITION
_READINGS = ("official", "lmms")


class MMEScores(GroupedMetric):
    """Accuracy, and the benchmark's points.

    A reference holds ``answer`` (yes, no), ``category`` (a subtask) and ``pair``, the image's name; the two questions
    of a pair are found by category and name, not by order.

    Scores:
        ``accuracy``: right answers over all questions, as lmms-eval reads them. That the sub-token paper prints this is
            a reading: its figures are whole numbers of 2,374 questions, and it names no score.
        ``official_accuracy``: the same, as MME's own program reads them.
        ``official_perception``, ``official_cognition``, ``lmms_perception``, ``lmms_cognition``: points, the sum over
            subtasks of 100 (accuracy + share of pairs with both answers right): up to 2000 and 800.
        ``official_SUBTASK``: points of one subtask, up to 200.

    A question without its partner, as a limited run leaves, counts for the accuracies but not for points.
    """

    points = frozenset(
        [f"{reading}_{total}" for reading in _READINGS for total in ("perception", "cognition")]
        + [f"official_{name}" for name in MME_SUBTASKS]
    )

    @staticmethod
    def marked(prediction: str, reference: Mapping[str, Any]) -> tuple[int, int]:
        """The pair of one image; whether both readings are right, and the subtask."""
        category, answer = reference["category"], reference["answer"]
        right = (official_answer(prediction) == answer) + 2 * (begun_answer(prediction) == answer)
        return group_key(f"{category}/{reference['pair']}"), right + 4 * MME_SUBTASKS.index(category)

    def compute(self) -> dict[str, Tensor]:
        """Scores by name; points of subtasks without a whole pair are left out."""
        keys_N, marks_N = self.kept()
        right_N2, subtask_N = bits_of(marks_N, 2), marks_N >> 2
        accuracy_2 = right_N2.double().mean(dim=0)
        scores = {"accuracy": accuracy_2[1], "official_accuracy": accuracy_2[0]}
        by_subtask = {
            name: _points(keys_N[subtask_N == number], right_N2[subtask_N == number])
            for number, name in enumerate(MME_SUBTASKS)
        }
        found = {name: points_2 for name, points_2 in by_subtask.items() if points_2 is not None}
        for total, names in (("perception", MME_PERCEPTION), ("cognition", MME_COGNITION)):
            if own := [found[name] for name in names if name in found]:
                points_2 = torch.stack(own).sum(dim=0)
                scores |= {f"{reading}_{total}": points_2[i] for i, reading in enumerate(_READINGS)}
        return scores | {f"official_{name}": points_2[0] for name, points_2 in found.items()}

    @staticmethod
    def score(prediction: Prediction, reference: Mapping[str, Any]) -> float:
        """The sample's term of ``accuracy``."""
        assert isinstance(prediction, str)
        return float(begun_answer(prediction) == reference["answer"])


def official_answer(text: str) -> str:
    """``yes`` or ``no``, whichever is within the first four characters in lower case (yes first); else ``other``."""
    return _within_four(text.lower())


def begun_answer(text: str) -> str:
    """As ``official_answer``, but without surrounding space and full stops, and "y" and "n" alone are answers."""
    text = text.lower().strip().replace(".", "")
    return {"y": "yes", "n": "no"}.get(text) or _within_four(text)


def _within_four(text: str) -> str:
    return next((answer for answer in ("yes", "no") if answer in text[:4]), "other")


def _points(keys_N: Tensor, right_N2: Tensor) -> Tensor | None:
    """Points of one subtask in both readings; None where it has no whole pair."""
    groups = groups_of(keys_N, right_N2)
    whole_G = groups.sizes_G == 2
    if not whole_G.any():
        return None
    accuracy_2 = groups.count_GM[whole_G].double().mean(dim=0) / 2
    return 100 * (accuracy_2 + groups.all_GM[whole_G].double().mean(dim=0))
