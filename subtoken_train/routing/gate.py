"""The value gate: how loud a kept group is (ours; the paper keeps values as they are).

Legend: B batch, N positions, S value groups.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ValueGate(nn.Module):
    """One layer's factor 2 * sigmoid(beta * logit) on kept groups, with one learned number beta.

    beta starts at 0, where the factor is 1 exactly: gated values are what is cached, and neutral settings stay exact.
    It costs no byte and nothing in decoding, and it saves none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.zeros(1, dtype=torch.float32))

    def forward(self, logits_BNS: Tensor) -> Tensor:
        """Factors [B, N, S] in fp32, between 0 and 2."""
        return 2 * torch.sigmoid(self.beta.float() * logits_BNS)
