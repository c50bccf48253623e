"""What a group selector is, and the settings of routing.

Legend: B batch, N positions, D model width, S value groups, g channels of a group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor, nn

from subtoken_train.errors import unknown_name
from subtoken_train.functional.groups import Layout, check_groups
from subtoken_train.functional.ledger import KVShape

BudgetKind = Literal["per_token", "global"]


@dataclass
class RoutingConfig:
    """Settings of value-group routing; the same for every layer.

    Attributes:
        selector: what chooses groups: the learned routers ``linear`` and ``mlp``, or the router-free controls
            ``value_norm``, ``random`` and ``static``.
        num_groups: S, value groups per token.
        kept_groups: K, groups kept per routed token (on average, under a global budget).
        layout: ``contiguous`` splits the whole value vector; ``per_head`` splits every head alike.
        budget: ``per_token`` keeps K groups of each token; ``global`` the best N*K pairs of each sample.
        query_conditioned: the mean router input of the query region joins a learned router's input.
        balance_weight: lambda, weight of the load-balance loss of learned routers.
        seed: seed of the ``random`` and ``static`` selectors.
    """

    selector: str = "linear"
    num_groups: int = 16
    kept_groups: int = 4
    layout: Layout = "contiguous"
    budget: BudgetKind = "per_token"
    query_conditioned: bool = False
    balance_weight: float = 0.01
    seed: int = 0

    def check(self, shape: KVShape) -> None:
        """Raise a worded ``ValueError`` where the settings do not fit the backbone."""
        check_groups(self.num_groups, self.kept_groups, shape.num_kv_heads, shape.head_dim, self.layout)
        if self.budget not in get_args(BudgetKind):
            raise unknown_name("budget", self.budget, get_args(BudgetKind))
        if self.balance_weight < 0:
            raise ValueError(f"balance_weight={self.balance_weight} must not be negative; 0 turns the loss off")


@dataclass
class SelectorInput:
    """What a selector may look at, in one layer, for prompt tokens only.

    Attributes:
        hidden_BND: the hidden state that ``v_proj`` sees.
        value_groups_BNSg: that projection's output, split into groups; never a gradient path for scores.
        query_summary_BD: mean of ``hidden`` over the query region; None unless the selector is query-conditioned.
        position_BN: original positions, int64.
        sample_seed_B: a number that belongs to the sample, int64.
        layer: layer index.
    """

    hidden_BND: Tensor
    value_groups_BNSg: Tensor
    query_summary_BD: Tensor | None
    position_BN: Tensor
    sample_seed_B: Tensor
    layer: int


class Selector(nn.Module, ABC):
    """Scores the value groups of every token of a layer; the budget turns scores into a mask."""

    learned: bool = False
    query_conditioned: bool = False

    @abstractmethod
    def forward(self, view: SelectorInput) -> Tensor:
        """Scores [B, N, S] in fp32; higher is kept. With gradient only for learned selectors."""
