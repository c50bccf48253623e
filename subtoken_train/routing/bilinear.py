"""Bilinear router (ours): a_i = W h_i + b + E [(A h_i) * (C s_Q)], so that a token's logits depend on the query.

The paper's query conditioning (section 3.4, ``query_conditioned``) adds one number per group to all tokens of a sample:
within a group the order of tokens, and under a budget per token also which of two tokens is treated how, cannot follow
the question. Here the question chooses, through a small rank, which directions of a token count.

Legend: B batch, N positions, D model width, S value groups, R rank.
"""

from __future__ import annotations

from torch import Tensor, nn

from subtoken_train.routing.base import RoutingConfig
from subtoken_train.routing.linear import LinearRouter, fp32_linear, init_router
from subtoken_train.view.view import View


class BilinearRouter(LinearRouter):
    """The linear router's logits plus E [(A h) * (C s_Q)]; with ``query_conditioned`` also its linear map of s_Q.

    A and C are [R, D], E is [S, R], without biases. All are drawn from N(0, 0.02), as routers are: the product of three
    small factors starts far below W h and yet gives every one of them a gradient, where zeros would give none to two.
    """

    def __init__(self, hidden_size: int, config: RoutingConfig) -> None:
        super().__init__(hidden_size, config)
        self.query_conditioned = True
        self.token_side = nn.Linear(hidden_size, config.query_rank, bias=False)
        self.query_side = nn.Linear(hidden_size, config.query_rank, bias=False)
        self.meeting = nn.Linear(config.query_rank, config.num_groups, bias=False)
        init_router(self)

    def forward(self, view: View) -> Tensor:
        """Logits [B, N, S] in fp32."""
        query_BR = fp32_linear(self.query_side, view.query_summary_BD)
        token_BNR = fp32_linear(self.token_side, view.hidden_BND)
        return super().forward(view) + fp32_linear(self.meeting, token_BNR * query_BR[:, None])
