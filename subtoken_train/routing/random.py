"""Router-free control: groups at random, anew for every token, layer and sample.

Legend: B batch, N positions, S value groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subtoken_train.functional.hashing import uniform_hash
from subtoken_train.routing.base import RoutingConfig, Selector
from subtoken_train.view.view import View


class RandomSelector(Selector):
    """Uniform scores from a hash of (seed, sample, layer, position, group): reproducible, batch-independent."""

    def __init__(self, hidden_size: int, config: RoutingConfig) -> None:
        super().__init__()
        self.seed = config.seed

    def forward(self, view: View) -> Tensor:
        """Random scores [B, N, S] in fp32."""
        groups_S = torch.arange(view.value_groups_BNSg.shape[2], device=view.hidden_BND.device)
        sample_B11, position_BN1 = view.sample_seed_B[:, None, None], view.ordinal_BN[..., None]
        return uniform_hash(sample_B11, position_BN1, groups_S, self.seed, view.layer)
