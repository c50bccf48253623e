"""What an answer contains of what was asked: RULER's match of texts (Hsieh et al., COLM 2024), and facts recalled.

Two programs score RULER, and differ in what they do with control characters inside an answer (line breaks, tabs): RULER
itself makes each a line break, kvpress takes it away, so that texts on both sides may join. Both ignore case, and both
round each task's mean to two decimals of a percentage, which is not done here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from subtoken_train.datasets.recall import recall_accuracy
from subtoken_train.evaluation.metrics.metric import MeanScores, Prediction, TaskMetric

RULER_TASKS = (
    "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
    "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2",
)  # fmt: skip
_CONTROL = re.compile(r"[\x00-\x1f]")


def string_match_all(text: str, expected: Sequence[str]) -> float:
    """The share of ``expected`` that ``text`` contains, in any case."""
    return sum(one.lower() in text.lower() for one in expected) / len(expected)


def string_match_part(text: str, expected: Sequence[str]) -> float:
    """1 where ``text`` contains any of ``expected``, in any case."""
    return float(any(one.lower() in text.lower() for one in expected))


def ruler_score(prediction: str, task: str, expected: Sequence[str], control: str = "\n") -> float:
    """An answer's score: any expected text counts in full for ``qa`` tasks, each one alike for the others.

    Args:
        prediction: the answer.
        task: one of ``RULER_TASKS``.
        expected: texts, at least one.
        control: what takes the place of control characters: a line break for RULER, nothing for kvpress.
    """
    match = string_match_part if task.startswith("qa") else string_match_all
    return match(_CONTROL.sub(control, prediction.strip()).strip(), expected)


class RulerMatch(TaskMetric):
    """``string_match``, of references ``{"task": name, "answers": [text, ...]}``: the mean over the tasks' means.

    ``kvpress_string_match`` is kvpress's reading. Each task's own mean has the task's name. ``score`` is a sample's
    term of its task's mean; where tasks differ in size the mean of scores is not the mean over tasks.
    """

    sums: Tensor  # [2, tasks]: RULER's reading, kvpress's
    counts: Tensor  # [tasks]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sums", torch.zeros(2, len(RULER_TASKS), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("counts", torch.zeros(len(RULER_TASKS), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, predictions: Sequence[Prediction], references: Sequence[Mapping[str, Any]]) -> None:
        """Score answers."""
        for prediction, reference in zip(predictions, references, strict=True):
            assert isinstance(prediction, str)
            task, answers = reference["task"], reference["answers"]
            place = RULER_TASKS.index(task)
            self.sums[0, place] += ruler_score(prediction, task, answers)
            self.sums[1, place] += ruler_score(prediction, task, answers, control="")
            self.counts[place] += 1

    def compute(self) -> dict[str, Tensor]:
        """Both means over the tasks that were asked, and each task's."""
        asked = self.counts > 0
        ruler, kvpress = (self.sums / self.counts)[:, asked]
        tasks = [name for name, any_of_it in zip(RULER_TASKS, asked.tolist(), strict=True) if any_of_it]
        means = {"string_match": ruler.mean(), "kvpress_string_match": kvpress.mean()}
        return means | dict(zip(tasks, ruler, strict=True))

    @staticmethod
    def score(prediction: Prediction, reference: Mapping[str, Any]) -> float:
        """RULER's score of the answer."""
        assert isinstance(prediction, str)
        return ruler_score(prediction, reference["task"], reference["answers"])


class RecallScore(MeanScores):
    """``score``: mean over contexts of the share of asked facts that are stated exactly.

    A reference holds ``codes``, name to code.
    """

    names = ("score",)

    @staticmethod
    def figures(prediction: str, reference: Mapping[str, Any]) -> dict[str, float]:
        """The context's share."""
        return {"score": recall_accuracy(prediction, reference["codes"])}
