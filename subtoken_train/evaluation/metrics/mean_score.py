"""The plain mean of per-sample scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from subtoken_train.evaluation.metrics.base import Prediction, TaskMetric


class MeanScore(TaskMetric):
    """Mean of ``score`` over all samples, as ``score``; subclasses say what a sample's score is."""

    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, predictions: Sequence[Prediction], references: Sequence[Mapping[str, Any]]) -> None:
        """Add the samples' scores."""
        for prediction, reference in zip(predictions, references, strict=True):
            self.total += self.score(prediction, reference)
            self.count += 1

    def compute(self) -> dict[str, Tensor]:
        """``score``; NaN without samples."""
        return {"score": self.total / self.count}
