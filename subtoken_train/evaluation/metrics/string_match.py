"""Match of expected texts in an answer: RULER's (Hsieh et al., COLM 2024), and recalled facts.

Two programs score RULER, and differ in what they do with control characters inside an answer (line breaks, tabs): RULER
itself makes each a line break, kvpress takes it away, so that texts on both sides may join. Both ignore case, and both
round each task's mean to two decimals of a percentage, which is not done here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from subtoken_train.datasets.recall import recall_accuracy
from subtoken_train.evaluation.metrics.metric import MeanScores, mean

RULER_TASKS = (
    "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
    "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2",
)  # fmt: skip
_CONTROL = re.compile(r"[\x00-\x1f]")


def ruler_score(prediction: str, task: str, expected: Sequence[str], control: str = "\n") -> float:
    """Return an answer's score: any expected text counts in full for ``qa`` tasks, each one alike for the others.

    ``control`` takes the place of control characters: a line break for RULER, nothing for kvpress.
    """
    text = _CONTROL.sub(control, prediction.strip()).strip().lower()
    found = [one.lower() in text for one in expected]
    return float(any(found)) if task.startswith("qa") else sum(found) / len(expected)


class RulerMatch(MeanScores):
    """``string_match``, of references ``{"task": name, "answers": [text, ...]}``: the mean over the tasks' means.

    ``kvpress_string_match`` is kvpress's reading. Each task's own mean has the task's name. ``score`` is a sample's
    term of its task's mean; where tasks differ in size the mean of scores is not the mean over tasks.
    """

    names = (*RULER_TASKS, *(f"kvpress_{task}" for task in RULER_TASKS))
    subtasks = RULER_TASKS

    @staticmethod
    def figures(prediction: str, reference: Mapping[str, Any]) -> dict[str, float]:
        task, answers = reference["task"], reference["answers"]
        kvpress = ruler_score(prediction, task, answers, control="")
        return {task: ruler_score(prediction, task, answers), f"kvpress_{task}": kvpress}

    def compute(self) -> dict[str, float]:
        means = super().compute()
        ruler = {task: means[task] for task in RULER_TASKS if task in means}
        kvpress = [means[f"kvpress_{task}"] for task in ruler]
        return {"string_match": mean([*ruler.values()]), "kvpress_string_match": mean(kvpress), **ruler}

    @classmethod
    def score(cls, prediction: Any, reference: Mapping[str, Any]) -> float:
        return cls.figures(prediction, reference)[reference["task"]]


class RecallScore(MeanScores):
    """``score``: mean over contexts of the share of asked facts that are stated exactly.

    A reference holds ``codes``, name to code.
    """

    names = ("score",)

    @staticmethod
    def figures(prediction: str, reference: Mapping[str, Any]) -> dict[str, float]:
        return {"score": recall_accuracy(prediction, reference["codes"])}
