"""The mean of marked rows.

Legend: B batch, N positions, D width of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor


def masked_mean(rows_BND: Tensor, mask_BN: Tensor) -> Tensor:
    """Mean over the marked rows, [B, D] in fp32 under any autocast; zeros where none is marked.

    A gradient flows to the marked rows.

    Args:
        rows_BND: floating point.
        mask_BN: bool.
    """
    weight_BN = mask_BN.float()
    with torch.autocast(rows_BND.device.type, enabled=False):
        sum_BD = (weight_BN[:, None] @ rows_BND.float()).squeeze(1)
    return sum_BD / weight_BN.sum(-1, keepdim=True).clamp(min=1)
