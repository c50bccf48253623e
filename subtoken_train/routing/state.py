"""Routing in one prompt pass: what routers read, and what they did (every layer's choice and its balance loss).

Legend: B batch, N positions, S value groups, h key-value heads, O a router's outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from subtoken_train.functional.objective import balance_loss


class Spent(NamedTuple):
    """A layer's choice within a byte budget."""

    groups_BNS: Tensor  # groups that stay, bool
    keys_BhN: Tensor  # keys that stay, bool; of tokens that are not routed, all
    cut_Bh: Tensor  # the logit of a group that was only just worth its bytes, fp32


@dataclass
class RoutingState:
    """One prompt pass: what is routed (bool), and by layer what the layers did."""

    routed_BN: Tensor
    query_BN: Tensor  # tokens of the query summary, bool
    position_BN: Tensor  # original positions, int64
    sample_seed_B: Tensor
    deferred: dict[int, tuple[Tensor, Tensor]] | None = None
    """The projection's input and output that wait for ``route_deferred``; None where nothing waits."""
    rank_BN: Tensor | None = None
    """The reducer's rank of each routed token within its sample, int64, 0 the best; None where it ranks nothing."""
    masks: dict[int, Tensor] = field(default_factory=dict)
    """The hard mask, bool [B, N, S]; True for every group of an unrouted token."""
    keys: dict[int, Tensor] = field(default_factory=dict)
    """Keys that stay under a byte budget, bool [B, h, N], all of an unrouted token; empty under other budgets."""
    scopes: list[Tensor] | None = None
    """Tokens that one budget of all layers chooses among, bool; None outside of the pass that looks for it."""
    scores: dict[int, Tensor] = field(default_factory=dict)
    """Found by that pass: logits of groups and keys, [B, N, O] in fp32."""
    chosen: dict[int, Spent] = field(default_factory=dict)  # the choice of such a budget
    fills: dict[int, Tensor] = field(default_factory=dict)
    """Values that dropped groups read as, [B, d_v] in the values' dtype, without gradient; empty where that is zero."""
    choices: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)
    """For the balance loss, of learned selectors: the scores, the hard mask, and the tokens it was chosen for."""
    ahead: dict[int, Tensor] = field(default_factory=dict)
    """The projection's output over all rows, of a layer that runs a chunk of rows at a time."""
    query_attention: Callable[[int, Tensor], Tensor] | None = None
    """From layer and input [B, N, D] to the attention of rows ``query_BN`` to all, [B, N] in fp32; None: not read."""
    part: tuple[int, int] = (0, 0)  # the rows of that chunk, (first, one past the last)

    def on(self, device: torch.device) -> RoutingState:
        """The same for a layer on a device; what layers note stands in one place."""
        if device == self.routed_BN.device:
            return self
        tensors: dict[str, Any] = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **tensors)

    def mean_balance(self) -> Tensor:
        """Return the balance loss averaged over layers and samples, a scalar; 0 where nothing is learned."""
        return self.balances().mean() if self.choices else torch.zeros((), device=self.routed_BN.device)

    def balances(self) -> Tensor:
        """Return the balance loss of each of ``choices`` and sample, [layers, B]; rows that are gone are unrouted."""
        scores, hard, routed = (
            pad_sequence([part.transpose(0, 1) for part in parts], batch_first=True).transpose(1, 2).flatten(0, 1)
            for parts in zip(*self.choices.values(), strict=True)
        )
        return balance_loss(scores, hard, routed).reshape(len(self.choices), -1)
