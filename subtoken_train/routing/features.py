"""Features of tokens beside their hidden state, for learned routers (ours): what they are, and how they enter logits.

``norm``: log of the value norm of each group, S numbers a token. ``attention``: log of the attention that the query's
rows pay the token in that layer, the mean over rows and heads, one number. Both are standardised over the routed tokens
of a sample (``functional.group_norms``) and have no gradient: a router learns to read them, and nothing to make them.

Legend: B batch, N positions, F features, S value groups.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from subtoken_train.functional.group_norms import standardised_log
from subtoken_train.routing.base import RoutingConfig, SelectorInput
from subtoken_train.routing.linear import fp32_linear, init_router


class FeatureMap(nn.Module):
    """One layer's learned linear map from features to logits, drawn from N(0, 0.02), without a bias."""

    def __init__(self, config: RoutingConfig) -> None:
        super().__init__()
        self.names = config.features
        sizes = {"norm": config.num_groups, "attention": 1}
        self.map = nn.Linear(sum(sizes[name] for name in self.names), config.num_groups, bias=False)
        init_router(self)

    def forward(self, view: SelectorInput, routed_BN: Tensor) -> Tensor:
        """What is added to a router's logits, [B, N, S] in fp32; ``routed_BN`` are the tokens that are compared."""
        found = []
        for name in self.names:
            if name == "norm":
                raw = torch.linalg.vector_norm(view.value_groups_BNSg.detach().float(), dim=-1)
            else:
                raw = view.query_attention()[..., None]
            found.append(standardised_log(raw, routed_BN))
        return fp32_linear(self.map, torch.cat(found, -1))
