"""Yes/no questions: POPE's and MME's, in the readings of their own programs, LLaVA and lmms-eval.

Sources: Li et al., arXiv:2305.10355; ``llava/eval/eval_pope.py`` of LLaVA; ``tasks/pope/utils.py`` of lmms-eval. Fu et
al., arXiv:2306.13394, ``eval_tool/calculation.py``; ``tasks/mme/utils.py`` of lmms-eval.

Legend: C categories, R readings (LLaVA, lmms-eval), P predictions (no, yes, other), L labels (no, yes); N samples of
MME, G pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from subtoken_train.evaluation.metrics.metric import (
    GroupedMetric,
    Prediction,
    TaskMetric,
    bits_of,
    group_key,
    groups_of,
)

POPE_CATEGORIES = ("adversarial", "popular", "random")
_NO, _YES, _OTHER = range(3)
_ANSWERS = {"no": _NO, "yes": _YES}
MME_PERCEPTION = (
    "existence", "count", "position", "color", "posters", "celebrity", "scene", "landmark", "artwork", "OCR",
)  # fmt: skip
MME_COGNITION = ("commonsense_reasoning", "numerical_calculation", "text_translation", "code_reasoning")
MME_SUBTASKS = MME_PERCEPTION + MME_COGNITION
_READINGS = ("official", "lmms")


class POPEScores(TaskMetric):
    """Scores over the counts of predictions and labels; a label belongs to its sample and is not matched by order.

    A reference holds ``label`` (yes, no) and ``category``.

    Scores:
        ``accuracy``, ``precision``, ``recall``, ``f1``, ``yes_rate``: all samples together, answers as LLaVA reads
            them (``first_sentence_answer``); the positive class is yes, and ``yes_rate`` is how often the *model* says
            yes.
        ``accuracy_CATEGORY``, ``f1_CATEGORY``: the same of one category that has samples.
        ``llava_f1``: mean of the categories' F1, as LLaVA-1.5's table.
        ``lmms_accuracy``, ``lmms_precision``, ``lmms_recall``, ``lmms_f1``: lmms-eval's, which wants exactly "yes" or
            "no" (``bare_answer``): "Yes." is wrong, and a missed yes counts for recall only where the answer is "no".
        ``lmms_yes_ratio``: as lmms-eval's code has it, the share of yes among the *labels*.

    Where no answer or no label is yes, LLaVA's program stops with a ZeroDivisionError; here, as in lmms-eval, a
    fraction of nothing is 0.
    """

    counts_CRPL: Tensor

    def __init__(self) -> None:
        super().__init__()
        counts_CRPL = torch.zeros(len(POPE_CATEGORIES), 2, 3, 2, dtype=torch.int64)
        self.add_state("counts_CRPL", counts_CRPL, dist_reduce_fx="sum")

    def update(self, predictions: Sequence[Prediction], references: Sequence[Mapping[str, Any]]) -> None:
        """Count generated answers."""
        for prediction, reference in zip(predictions, references, strict=True):
            assert isinstance(prediction, str)
            category, label = POPE_CATEGORIES.index(reference["category"]), _ANSWERS[reference["label"]]
            self.counts_CRPL[category, 0, _ANSWERS[first_sentence_answer(prediction)], label] += 1
            self.counts_CRPL[category, 1, _ANSWERS.get(bare_answer(prediction), _OTHER), label] += 1

    def compute(self) -> dict[str, Tensor]:
        """Scores by name."""
        counts_CRPL = self.counts_CRPL.double()
        counts_RPL = counts_CRPL.sum(dim=0)
        scores = _fractions(counts_RPL[0])
        scores["yes_rate"] = _ratio(counts_RPL[0, _YES].sum(), counts_RPL[0].sum())
        by_category = {
            name: _fractions(counts_PL)
            for name, counts_PL in zip(POPE_CATEGORIES, counts_CRPL[:, 0], strict=True)
            if counts_PL.sum() > 0
        }
        for name, own in by_category.items():
            scores |= {f"accuracy_{name}": own["accuracy"], f"f1_{name}": own["f1"]}
        scores["llava_f1"] = torch.stack([own["f1"] for own in by_category.values()] or [torch.zeros(())]).mean()
        scores |= {f"lmms_{name}": value for name, value in _fractions(counts_RPL[1]).items()}
        scores["lmms_yes_ratio"] = _ratio(counts_RPL[1, :, _YES].sum(), counts_RPL[1].sum())
        return scores

    @staticmethod
    def score(prediction: Prediction, reference: Mapping[str, Any]) -> float:
        """The sample's term of ``accuracy``."""
        assert isinstance(prediction, str)
        return float(first_sentence_answer(prediction) == reference["label"])


def first_sentence_answer(text: str) -> str:
    """``no`` if a word of the first sentence is No, no or not; ``yes`` for all other text, nothing and "NO" included.

    The sentence ends at the first full stop, commas are removed, and words are separated by single spaces (a line break
    separates nothing).
    """
    words = text.partition(".")[0].replace(",", "").split(" ")
    return "no" if {"No", "not", "no"} & set(words) else "yes"


def bare_answer(text: str) -> str:
    """The text in lower case without surrounding space; it is right only if it is the label."""
    return text.lower().strip()


def _fractions(counts_PL: Tensor) -> dict[str, Tensor]:
    true_yes, false_yes, false_no = counts_PL[_YES, _YES], counts_PL[_YES, _NO], counts_PL[_NO, _YES]
    precision, recall = _ratio(true_yes, true_yes + false_yes), _ratio(true_yes, true_yes + false_no)
    return {
        "accuracy": _ratio(true_yes + counts_PL[_NO, _NO], counts_PL.sum()),
        "precision": precision,
        "recall": recall,
        "f1": _ratio(2 * precision * recall, precision + recall),
    }


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    return part / whole if whole > 0 else torch.zeros_like(part)


class MMEScores(GroupedMetric):
    """Accuracy, and the benchmark's points.

    A reference holds ``answer`` (yes, no), ``category`` (a subtask) and ``pair``, the image's name; the two questions
    of a pair are found by category and name, not by order.

    Scores:
        ``accuracy``: right answers over all questions, as lmms-eval reads them (what the paper prints).
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
