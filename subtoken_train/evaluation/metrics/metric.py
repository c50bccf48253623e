"""What every task's metric is: a torchmetrics metric over predictions and references, with a score per sample."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor
from torchmetrics import Metric

Prediction = str | list[float]
"""A generated answer (stripped of surrounding space by the runner), or the log-likelihood of each choice."""


class TaskMetric(Metric):
    """Scores of a task.

    States reduce under DDP as torchmetrics reduces them (sums, or concatenated tensors), so that processes that saw
    different samples give the scores of one that saw all. Nothing is matched by order: what belongs together carries an
    id.
    """

    full_state_update = False
    higher_is_better = True
    points: ClassVar[frozenset[str]] = frozenset()
    """Scores that are no fractions (MME's points, CIDEr, perplexity); all others lie in 0..1."""

    @abstractmethod
    def update(self, predictions: Sequence[Prediction], references: Sequence[Mapping[str, Any]]) -> None:
        """Take predictions with the ``reference`` of their samples."""

    @abstractmethod
    def compute(self) -> dict[str, Tensor]:
        """Scores by name. References' oddities are scores of their own name (``llava_f1``), never mixed into others."""

    @staticmethod
    @abstractmethod
    def score(prediction: Prediction, reference: Mapping[str, Any]) -> float:
        """The sample alone, usually in 0..1: what paired intervals and bars are made of.

        For a metric that is a mean over samples it is that sample's term; for others (F1, CIDEr, circular accuracy) it
        is the closest per-sample figure, and the class says which.
        """
