"""What dropped groups read as, written out for one layer of one sample.

Legend: N rows of a sample, h key-value heads, d head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from subtoken_train.engine.compressed_backbone import CompressedBackbone


@dataclass
class PlainFill:
    """The mean of the values of ``rows_N``, or ``vector_hd``; zero where both are None."""

    rows_N: Tensor | None = None
    vector_hd: Tensor | None = None

    def under(self, value_1hMd: Tensor, factor_hNd: Tensor) -> Tensor:
        """What the first rows' values leave to it, [1, h, N, d]: all where their factor is 0, nothing where it is 1."""
        if self.rows_N is not None:
            own = torch.stack([value_1hMd[0, :, row].float() for row in self.rows_N.nonzero()[:, 0].tolist()])
            fill_hd = own.mean(0)
        elif self.vector_hd is not None:
            fill_hd = self.vector_hd
        else:
            return torch.zeros_like(value_1hMd[:, :, : factor_hNd.shape[1]])
        return (fill_hd.to(value_1hMd.dtype)[:, None] * (1 - factor_hNd.to(value_1hMd.dtype)))[None]


def plain_fill(backbone: CompressedBackbone, layer: int, routed_N: Tensor, mask: Tensor | None) -> PlainFill:
    """Of a layer that routes these rows, or (no mask) none."""
    if mask is None:
        return PlainFill()
    kind, shape = backbone.bank.config.fill, backbone.family.shape
    if kind == "mean" and bool(routed_N.any()):
        return PlainFill(rows_N=routed_N)
    if kind == "learned":
        return PlainFill(vector_hd=backbone.bank.fills[layer].vector.detach().view(shape.num_kv_heads, shape.head_dim))
    return PlainFill()
