"""What every task's metric is: a torchmetrics metric over predictions and references, with a score per sample.

Legend: S scores.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
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


class MeanScores(TaskMetric):
    """The mean of every score over the samples that have it; only sums and counts are held, in double precision."""

    names: ClassVar[tuple[str, ...]]
    """All scores; the first is the sample's own (``score``)."""

    sums_S: Tensor
    counts_S: Tensor

    def __init__(self) -> None:
        super().__init__()
        zeros_S = torch.zeros(len(self.names), dtype=torch.float64)
        self.add_state("sums_S", zeros_S, dist_reduce_fx="sum")
        self.add_state("counts_S", zeros_S.clone(), dist_reduce_fx="sum")

    @staticmethod
    @abstractmethod
    def figures(prediction: Any, reference: Mapping[str, Any]) -> dict[str, float]:
        """One answer's scores, in 0..1. A score that is taken over other samples only is left out.

        Args:
            prediction: a text, or log-likelihoods where the task asks for those.
            reference: of the sample.
        """

    def update(self, predictions: Sequence[Prediction], references: Sequence[Mapping[str, Any]]) -> None:
        """Take answers with the references of their samples."""
        for prediction, reference in zip(predictions, references, strict=True):
            found = self.figures(prediction, reference)
            self.sums_S += torch.tensor([found.get(name, 0.0) for name in self.names], dtype=torch.float64).to(
                self.sums_S
            )
            self.counts_S += torch.tensor([name in found for name in self.names]).to(self.counts_S)

    def compute(self) -> dict[str, Tensor]:
        """Means by name; a score that no sample had is left out."""
        means_S = self.sums_S / self.counts_S
        return {name: mean for name, mean, count in zip(self.names, means_S, self.counts_S, strict=True) if count > 0}

    @classmethod
    def score(cls, prediction: Prediction, reference: Mapping[str, Any]) -> float:
        """The sample's term of the mean that is named first."""
        return cls.figures(prediction, reference)[cls.names[0]]
