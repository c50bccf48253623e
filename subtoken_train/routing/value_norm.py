"""Router-free control: keep the groups with the largest value norm.

Legend: B batch, N positions, S value groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subtoken_train.routing.base import RoutingConfig, Selector
from subtoken_train.view.view import View


class ValueNormSelector(Selector):
    """Scores ||v_g||_2; no parameter, no gradient. The paper has no such control; it is a strong one."""

    def __init__(self, hidden_size: int, config: RoutingConfig) -> None:
        super().__init__()

    def forward(self, view: View) -> Tensor:
        """Group norms [B, N, S] in fp32."""
        norms_BNS: Tensor = torch.linalg.vector_norm(view.value_groups_BNSg.detach().float(), dim=-1)
        return norms_BNS
