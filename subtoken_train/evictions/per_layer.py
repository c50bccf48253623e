"""Layers keep as much as they are told, by a number for each.

Source: kvpress 0.5.4, ``per_layer_compression_press.py``, which takes a compression ratio per layer. Here the budget
stays the one that is asked for: the numbers are shares of it, and the layers of a sample keep exactly what they would
keep together without them. kvpress's ratios c_l are therefore written as shares 1 - c_l, and their mean is
``eviction_keep``. A method that divides the budget between layers itself (a pyramid) divides what it is given here.

Legend: B batch, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from subtoken_train.evictions.base import Wrapper
from subtoken_train.evictions.budgets import competing_counts, divide_budget
from subtoken_train.view.scores import Candidates, Scores

LARGEST = 1e100
"""Largest share, so that products with a budget and sums stay finite."""


@dataclass(frozen=True)
class PerLayer(Wrapper):
    """Shares of the budget, around any method.

    Attributes:
        shares: a number for every layer, 0 or more; only their ratios count. Written ``4:3:2:1`` on a command line. A
            layer keeps at least one entry, and no more than it has: what it cannot take goes to the others.
    """

    name: ClassVar[str] = "per_layer"
    across_layers: ClassVar[bool] = True

    shares: Sequence[float] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isinstance(self.shares, list | tuple) and self.shares):
            raise ValueError("per_layer needs shares, a number for every layer: 4:3:2:1, or [4, 3, 2, 1] in a file")
        object.__setattr__(self, "shares", tuple(self.shares))
        for share in self.shares:
            if type(share) not in (int, float) or not 0 <= share <= LARGEST:
                raise ValueError(
                    f"per_layer shares hold {share!r}; every one must be a number of 0 or more, at most 1e100"
                )
        if not any(self.shares):
            raise ValueError("per_layer shares are all 0; a layer must get something")

    def check_shape(self, num_layers: int, num_kv_heads: int, head_dim: int) -> None:
        if len(self.shares) != num_layers:
            raise ValueError(
                f"per_layer has {len(self.shares)} shares and the backbone {num_layers} layers; give one each"
            )
        super().check_shape(num_layers, num_kv_heads, head_dim)

    def counts(self, scores: list[Scores], candidates: Candidates) -> Tensor:
        budget_LB = candidates.budget_LB
        weight_LB = torch.tensor(self.shares, dtype=torch.float64)[:, None] * budget_LB.cpu()
        least_LB = torch.ones_like(budget_LB)
        given_LB = divide_budget(weight_LB, budget_LB.sum(0), least_LB, competing_counts(candidates))
        return self.base.counts(scores, replace(candidates, budget_LB=given_LB.to(budget_LB.device), exact_LB=None))
