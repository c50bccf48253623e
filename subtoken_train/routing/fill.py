"""What a dropped value group reads as, where that is not zero (ours; the paper reads it as zero).

``mean``: as the mean of the sample's routed tokens in that layer; one value vector per layer and sample, which a cache
stores and every budget counts. ``learned``: as a vector of the layer's own, a weight, which costs a cache nothing.
Either way routing acts on what is left of a value without it, v' = mu + f * (v - mu), and so do the norms that choose.

Legend: B batch, N positions, V value width d_v.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from subtoken_train.functional.masked_mean import masked_mean
from subtoken_train.types import Fill


class LearnedFill(nn.Module):
    """One layer's vector; it starts at 0, where a dropped group reads as zero."""

    def __init__(self, value_dim: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(value_dim, dtype=torch.float32))

    def forward(self) -> Tensor:
        """The vector, [1, V] in fp32."""
        return self.vector.float()[None]


def fill_of(kind: Fill, value_BNV: Tensor, routed_BN: Tensor, learned: nn.Module | None) -> Tensor | None:
    """What dropped groups of a layer read as, [B, V] or [1, V] in fp32; None: zero.

    Args:
        kind: of the routing.
        value_BNV: the value projection's output; a mean's gradient flows to it.
        routed_BN: tokens that are routed, bool; a sample without one has the mean 0.
        learned: the layer's own vector, under ``learned``.
    """
    if kind == "zero":
        return None
    if kind == "mean":
        return masked_mean(value_BNV, routed_BN)
    assert learned is not None
    filled: Tensor = learned()
    return filled
