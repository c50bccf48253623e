"""A loss: cross-entropy that counts less where the answer is known already.

Lin et al. 2017, "Focal Loss for Dense Object Detection", equation 4, for tokens of an answer.

Legend: L labelled targets of the batch, V vocabulary.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from subtoken_train.training.loss import Loss, LossInput


@dataclass(frozen=True)
class Focal(Loss):
    """(1 - p)^gamma times the cross-entropy of each target.

    Attributes:
        gamma: 0 is cross-entropy.
    """

    name: ClassVar[str] = "focal"
    gamma: float = 2.0

    def __post_init__(self) -> None:
        if self.gamma != 0 and self.gamma < 1:  # between them the gradient has no limit where an answer is certain
            raise ValueError(f"focal gamma is {self.gamma}; it must be 0, or 1 or more")

    def summed(self, view: LossInput) -> Tensor:
        """Return the sum over the targets, in fp32."""
        cross_L = F.cross_entropy(view.logits_LV.float(), view.targets_L, reduction="none")
        unknown_L = -(-cross_L).expm1()
        return (unknown_L**self.gamma * cross_L).sum()
