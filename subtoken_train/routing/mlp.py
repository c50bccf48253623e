"""Two-layer MLP router (paper, section 4.4).

READING. The paper says "a two-layer MLP" and no more: the hidden width D/4 and the GELU are ours, and so are what it
reads, its biases and its initial weights (see the linear router).

Legend: B batch, N positions, D model width, S value groups.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from subtoken_train.routing.base import RoutingConfig, Selector
from subtoken_train.routing.linear import fp32_linear, init_router
from subtoken_train.view.view import View


class MLPRouter(Selector):
    """Logits of the groups from a hidden layer over the token's state and, optionally, the query summary."""

    learned = True

    def __init__(self, hidden_size: int, config: RoutingConfig) -> None:
        super().__init__()
        width = max(1, hidden_size // 4)
        self.query_conditioned = config.query_conditioned
        self.token = nn.Linear(hidden_size, width)
        self.query = nn.Linear(hidden_size, width, bias=False) if config.query_conditioned else None
        self.out = nn.Linear(width, config.num_groups)
        init_router(self)

    def forward(self, view: View) -> Tensor:
        """Logits [B, N, S] in fp32."""
        features = fp32_linear(self.token, view.hidden_BND)
        if self.query is not None:
            features = features + fp32_linear(self.query, view.query_summary_BD)[:, None]
        return fp32_linear(self.out, F.gelu(features))
