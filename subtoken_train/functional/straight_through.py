"""Straight-through estimator for hard group masks (paper, section 3.6)."""

from __future__ import annotations

from torch import Tensor


def straight_through(hard: Tensor, logits: Tensor) -> Tensor:
    """The hard mask in the forward pass, exactly; the gradient of ``sigmoid(logits)`` in the backward pass.

    Args:
        hard: bool mask of any shape.
        logits: router logits of the same shape, floating point.

    Returns:
        A tensor of ``logits``' dtype that is exactly 0 or 1. The bracket matters: ``hard + soft - soft.detach()``
        would be off by rounding.
    """
    soft = logits.sigmoid()
    return hard.to(soft.dtype) + (soft - soft.detach())
