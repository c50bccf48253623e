"""Router-free control: one fixed set of groups per layer, the same for all tokens.

Legend: B batch, N positions, S value groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subtoken_train.functional.hashing import uniform_hash
from subtoken_train.routing.base import RoutingConfig, Selector
from subtoken_train.view.view import View


class StaticSelector(Selector):
    """Scores drawn once per layer from (seed, layer, group); equal to shrinking ``v_proj``, as a control."""

    same_for_all = True

    def __init__(self, hidden_size: int, config: RoutingConfig) -> None:
        super().__init__()
        self.seed = config.seed

    def forward(self, view: View) -> Tensor:
        """The layer's fixed scores, broadcast to [B, N, S] in fp32."""
        batch, length, num_groups, _ = view.value_groups_BNSg.shape
        groups_S = torch.arange(num_groups, device=view.hidden_BND.device)
        return uniform_hash(groups_S, self.seed, view.layer).expand(batch, length, num_groups)
