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
    """The mean of the values of ``rows_N``; zero where it is None."""

    rows_N: Tensor | None = None

    def under(self, value_1hMd: Tensor, factor_hNd: Tensor) -> Tensor:
        """What the first rows' values leave to it, [1, h, N, d]: all where their factor is 0, nothing where it is 1."""
        if self.rows_N is not None:
            own = torch.stack([value_1hMd[0, :, row].float() for row in self.rows_N.nonzero()[:, 0].tolist()])
            fill_hd = own.mean(0)
        else:
            return torch.zeros_like(value_1hMd[:, :, : factor_hNd.shape[1]])
        return (fill_hd.to(value_1hMd.dtype)[:, None] * (1 - factor_hNd.to(value_1hMd.dtype)))[None]


def plain_fill(backbone: CompressedBackbone, layer: int, routed_N: Tensor, mask: Tensor | None) -> PlainFill:
    """Of a layer that routes these rows, or (no mask) none."""
    if mask is None:
        return PlainFill()
    mean = backbone.bank.config.fill == "mean" and bool(routed_N.any())
    return PlainFill(rows_N=routed_N) if mean else PlainFill()
