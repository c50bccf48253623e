"""Router-free control: the first groups of each head, the same for all tokens, which nothing has to name.

Legend: B batch, N positions, S value groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subtoken_train.routing.base import RoutingConfig, Selector
from subtoken_train.view.view import View


class LeadingSelector(Selector):
    """Scores groups by how early in a head their channels lie on average; ties go to the lower group.

    Of values turned to their axes (``subtoken-train axes``), whose first channels hold the most, this is the low-rank
    cut of every value: what a choice for each token has to beat in the same bytes.
    """

    same_for_all = True

    def __init__(self, hidden_size: int, config: RoutingConfig) -> None:
        super().__init__()
        self.layout = config.layout

    def forward(self, view: View) -> Tensor:
        """One score a group, each another, broadcast to [B, N, S] in fp32."""
        batch, length, num_groups, channels = view.value_groups_BNSg.shape
        device = view.value_groups_BNSg.device
        order_S = torch.arange(num_groups, device=device)
        if self.layout == "contiguous":
            width = num_groups * channels // view.num_kv_heads
            places_Sg = torch.arange(num_groups * channels, device=device).view(num_groups, channels) % width
            order_S = places_Sg.sum(1).argsort(stable=True).argsort()
        return -order_S.float().expand(batch, length, num_groups)
