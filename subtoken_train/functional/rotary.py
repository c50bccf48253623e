"""Rotary position embeddings as an operation that can be undone.

Legend: B batch, h heads, N rows, d head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotation:
    """Rotation of the vectors of some rows by their positions, in Llama's form: channel i goes with i + d / 2.

    Attributes:
        cos_BNd: cosine of every row and channel, fp32; times the factor by which some scalings stretch vectors.
        sin_BNd: sine, likewise.
    """

    cos_BNd: Tensor
    sin_BNd: Tensor

    def turn(self, vectors_BhNd: Tensor) -> Tensor:
        """Vectors [B, h, N, d] turned by their rows' positions, fp32."""
        vectors = vectors_BhNd.float()
        return vectors * self.cos_BNd[:, None] + _quarter(vectors) * self.sin_BNd[:, None]

    def turn_back(self, vectors_BhNd: Tensor) -> Tensor:
        """Undo ``turn``: return the vectors [B, h, N, d] it was given, fp32. A mean of rotations cannot be undone."""
        vectors = vectors_BhNd.float()
        back = vectors * self.cos_BNd[:, None] - _quarter(vectors) * self.sin_BNd[:, None]
        return back / (self.cos_BNd.square() + self.sin_BNd.square())[:, None]

    def mean(self) -> Rotation:
        """The linear map that is the mean over the rows: [B, 1, d]."""
        return Rotation(self.cos_BNd.mean(1, keepdim=True), self.sin_BNd.mean(1, keepdim=True))


def _quarter(vectors: Tensor) -> Tensor:
    """Every pair of channels (x, y) as (-y, x)."""
    first, second = vectors.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)
