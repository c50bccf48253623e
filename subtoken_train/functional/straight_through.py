"""Straight-through estimator for hard group masks (paper, section 3.6)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def straight_through(hard: Tensor, logits: Tensor, learns: Tensor | None = None) -> Tensor:
    """The hard mask in the forward pass, exactly; the gradient of ``sigmoid(logits)`` in the backward pass.

    The function ``hard + (soft - soft.detach())`` with soft = sigmoid(logits), in as few operations as it takes: the
    forward pass has no use for the sigmoid. It has a first derivative only.

    Args:
        hard: bool mask of any shape.
        logits: router logits of the same shape, floating point.
        learns: bool, broadcast to that shape; where False, the gradient is zero. None: True everywhere.

    Returns:
        A tensor of ``logits``' dtype that is exactly 0 or 1.
    """
    masked: Callable[..., Tensor] = _StraightThrough.apply
    return masked(hard, logits, learns)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hard: Tensor, logits: Tensor, learns: Tensor | None) -> Tensor:
        ctx.save_for_backward(logits, learns)
        return hard.to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, None]:
        logits, learns = ctx.saved_tensors
        slope: Tensor = torch.ops.aten.sigmoid_backward(gradients[0], logits.sigmoid())
        return None, slope if learns is None else slope * learns, None
