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
    """A layer's choice within a byte budget.

    Attributes:
        groups_BNS: groups that stay, bool.
        keys_BhN: keys that stay, bool; of tokens that are not routed, all.
        cut_Bh: the logit of a group that was only just worth its bytes, fp32.
    """

    groups_BNS: Tensor
    keys_BhN: Tensor
    cut_Bh: Tensor


@dataclass
class RoutingState:
    """One prompt pass: what is routed, and what the layers did.

    Attributes:
        routed_BN: tokens that are routed, bool; all others keep every group.
        query_BN: tokens of the query summary, bool.
        position_BN: original positions, int64.
        sample_seed_B: a number per sample, int64.
        rank_BN: the token reducer's rank of each routed token within its sample, int64, 0 is the best; None where the
            reducer ranks nothing.
        masks: per layer the hard mask, bool [B, N, S]; True for every group of an unrouted token.
        deferred: per layer the projection's input and output that wait for ``route_deferred``; None where nothing
            waits.
        keys: per layer the keys that stay under a byte budget, bool [B, h, N]; True for those of an unrouted token.
            Empty under other budgets.
        scopes: per layer the tokens that one budget of all layers chooses among, bool; None outside of the pass that
            looks for it.
        scores: what that pass found by layer: logits of groups and keys, [B, N, O] in fp32.
        chosen: per layer what such a budget leaves.
        fills: per layer the value that dropped groups read as, without gradient, on the layer's device, [B, d_v] in the
            values' dtype; empty where they read as zero.
        choices: per layer the scores that were chosen by, the hard mask, and the routed tokens it was chosen for; what
            the balance loss is made of. Learned selectors only.
        ahead: the projection's output over all rows, of a layer that runs a chunk of rows at a time.
        query_attention: from a layer and its projections' input, [B, N, D], the attention of the rows ``query_BN`` to
            all, [B, N] in fp32 without gradient; None where no router reads it.
        part: the rows of that chunk, (first, one past the last).
    """

    routed_BN: Tensor
    query_BN: Tensor
    position_BN: Tensor
    sample_seed_B: Tensor
    deferred: dict[int, tuple[Tensor, Tensor]] | None = None
    rank_BN: Tensor | None = None
    masks: dict[int, Tensor] = field(default_factory=dict)
    keys: dict[int, Tensor] = field(default_factory=dict)
    scopes: list[Tensor] | None = None
    scores: dict[int, Tensor] = field(default_factory=dict)
    chosen: dict[int, Spent] = field(default_factory=dict)
    fills: dict[int, Tensor] = field(default_factory=dict)
    choices: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)
    ahead: dict[int, Tensor] = field(default_factory=dict)
    query_attention: Callable[[int, Tensor], Tensor] | None = None
    part: tuple[int, int] = (0, 0)

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
        """Return the balance loss per layer of ``choices`` (in its order, at least one) and sample, [layers, B].

        All layers at once: the tensors are small, and a layer would cost as many operations as all of them. Rows that
        layers above a cut no longer have are filled up with unrouted ones.
        """
        scores, hard, routed = (
            pad_sequence([part.transpose(0, 1) for part in parts], batch_first=True).transpose(1, 2).flatten(0, 1)
            for parts in zip(*self.choices.values(), strict=True)
        )
        return balance_loss(scores, hard, routed).reshape(len(self.choices), -1)
