"""Distillation from the uncompressed backbone: as what the answer's tokens are predicted where nothing is dropped.

Hinton, Vinyals and Dean 2015, "Distilling the Knowledge in a Neural Network", section 2. The teacher is the run's own
frozen backbone: LoRA off, no token reducer, no routing, no dropout, without gradient, in the same step and on the same
batch. So it costs a forward pass of the whole input and no weights; ``training/memory.py`` counts what it holds. It is
no second, larger model, and it knows nothing of the task that the backbone does not. An adapter holds nothing of it.

Legend: L labelled targets of the batch, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.engine.modes import evaluation_mode, without_lora
from subtoken_train.errors import check_range
from subtoken_train.families.family import Family
from subtoken_train.functional.objective import predicting_rows
from subtoken_train.reducers import build_reducer
from subtoken_train.types import Batch


@dataclass
class DistillationConfig:
    """Settings of the second term of the loss.

    Attributes:
        weight: of the divergence beside the answers' cross-entropy, which keeps weight 1; 0 only logs it.
        temperature: T; both distributions are softened by it, and the divergence is multiplied by T^2, so that its
            gradient keeps its size.
    """

    weight: float = 1.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_range("distillation weight", self.weight, 0, 10**6)
        check_range("distillation temperature", self.temperature, 0.01, 1000)


class Teacher:
    """The frozen backbone of a run, uncompressed and without its LoRA."""

    def __init__(self, family: Family) -> None:
        self._backbone = CompressedBackbone(family, build_reducer("none"))

    @torch.no_grad()
    def logits(self, batch: Batch) -> Tensor:
        """Return the logits of rows that predict a label, [L, V] in the backbone's dtype, in the labels' order."""
        rows_BN, _ = predicting_rows(batch.labels_BN)
        model = self._backbone.model
        with evaluation_mode(model), without_lora(model):
            return self._backbone.logits(self._backbone.run(batch), rows_BN)
