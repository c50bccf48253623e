"""Whether a run is still worth going on with: a loss or a weight that is NaN or infinite ends it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

FAULTS = (
    "",
    "a gradient was not finite: the trained weights are NaN or infinite",
    "the loss is NaN or infinite",
)
"""What the user is told, by a fault's number; 0: there is none. The greatest of all processes counts."""


class LossWatch:
    """Remembers on the device whether a loss was not finite; asking is one transfer per optimiser step."""

    def __init__(self) -> None:
        self._broken: Tensor | None = None

    def note(self, loss: Tensor) -> None:
        """Look at a micro-batch's loss, a scalar."""
        broken = ~torch.isfinite(loss.detach())
        self._broken = broken if self._broken is None else self._broken | broken

    def fault(self, module: nn.Module) -> int:
        """The number in ``FAULTS`` of what is wrong in this process, after an optimiser step."""
        if self._broken is not None and bool(self._broken):
            return 2
        return 0 if weights_are_finite(module) else 1


def weights_are_finite(module: nn.Module) -> bool:
    """Whether this process's part of the trained weights is finite.

    Looked at after an optimiser step. A NaN or infinite gradient makes AdamW's weights NaN in the same step, in every
    strategy, while gradients themselves are out of sight where DeepSpeed reduces them, and under fp16 infinite ones are
    skipped on purpose.
    """
    parts = [_local(parameter) for parameter in module.parameters() if parameter.requires_grad]
    return math.isfinite(float(get_total_norm([part for part in parts if part.numel()], math.inf)))


def _local(parameter: Any) -> Tensor:
    """The part of a parameter that this process holds (whole, ZeRO-3, FSDP2)."""
    part = getattr(parameter, "ds_tensor", parameter)
    tensor: Tensor = part.to_local() if hasattr(part, "to_local") else part
    return tensor.detach()
