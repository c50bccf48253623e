"""Accuracy of choices by log-likelihood.

Source: MMLU (Hendrycks et al., arXiv:2009.03300) as lm-evaluation-harness scores it, metric ``acc``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from subtoken_train.evaluation.metrics.metric import Prediction, TaskMetric


class MultipleChoice(TaskMetric):
    """How often the likeliest choice is the right one; among equals the first counts as chosen.

    A reference holds ``answer``, the index of the right choice. Likelihoods are taken as they are, not divided by
    length.

    Scores:
        ``accuracy``: over all samples, so subjects weigh by their size.
    """

    right: Tensor
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("right", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("total", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, predictions: Sequence[Prediction], references: Sequence[Mapping[str, Any]]) -> None:
        """Take log-likelihoods of choices."""
        self.right += int(sum(self.score(*pair) for pair in zip(predictions, references, strict=True)))
        self.total += len(predictions)

    def compute(self) -> dict[str, Tensor]:
        """The accuracy."""
        return {"accuracy": self.right.double() / self.total}

    @staticmethod
    def score(prediction: Prediction, reference: Mapping[str, Any]) -> float:
        """The sample's term of ``accuracy``."""
        assert not isinstance(prediction, str)
        return float(prediction.index(max(prediction)) == reference["answer"])
