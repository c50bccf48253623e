"""Shares of one byte budget, a constant of every head, learned beside its router (LKV).

Legend: B batch, N positions, L layers, h key-value heads, S groups, O outputs of a router.
"""

import torch
from torch import Tensor, nn

from subtoken_train.evictions.budgets import divide_budget
from subtoken_train.functional.one_budget import budget_bytes
from subtoken_train.ledger.kv_budget import KVShape, exact, head_costs
from subtoken_train.routing.base import RoutingConfig

RATE = 30.0  # factor of the parameters, so that shares move at a router's learning rate
FLATTEST = 1e-3  # of the slope below: so few of a head's entries hang in the balance that its share rests


def head_shares(logit_Lh: Tensor) -> Tensor:
    """Return shares of a mean budget, [L, h], whose mean is 1."""
    return logit_Lh.flatten().softmax(0).view_as(logit_Lh) * logit_Lh.numel()


class HeadShares(nn.ParameterList):
    """LKV: every head of every layer has a learned share of all bytes, the same for all prompts.

    Source: "LKV" (arXiv 2605.06676), of which no code was found. READING. A layer's parameters, [h], are logits of a
    softmax over the heads of all layers. A head keeps sinks, window, and what has the best logits, as far as its bytes
    go. The shares' gradient is that of a relaxed choice: entries stay by the sigmoid of their logit over a cut, where
    these sum to the head's bytes; a byte more lowers the cut by one over that sum's slope.
    """

    def __init__(self, config: RoutingConfig, shape: KVShape) -> None:
        super().__init__([torch.zeros(shape.num_kv_heads) for _ in range(shape.num_layers)])
        self.heads, self.groups = shape.num_layers * shape.num_kv_heads, config.num_groups // shape.num_kv_heads
        self.costs, self.share = head_costs(shape, config.num_groups), exact(config.byte_share)

    def of_all(self) -> Tensor:
        """Return each head's share of the mean of all, [L, h] in fp32."""
        return head_shares(RATE * torch.stack([*self]).float())

    @torch.no_grad()
    def spent(self, layer: int, count_B: Tensor, least_B: Tensor) -> Tensor:
        """Return the bytes of a layer's heads, int64 [B, h], of ``count_B`` entries each; ``least_B`` stay at least."""
        entry = self.costs.key + self.groups * self.costs.group  # the unit of whole ones: heads leave nothing over
        unit = entry if self.groups == 1 else 1
        total_B = budget_bytes(count_B * self.heads, self.costs.dense, self.share) // unit
        weight_RB = self.of_all().flatten()[:, None].expand(-1, len(count_B)).to(count_B.device)
        least_RB, most_RB = ((each_B * (entry // unit)).expand_as(weight_RB) for each_B in (least_B, count_B))
        return divide_budget(weight_RB, total_B, least_RB, most_RB).view(len(self), -1, len(count_B))[layer].T * unit

    def joined(self, layer: int, cut_Bh: Tensor, scores_BNO: Tensor, learns_BN: Tensor) -> Tensor:
        """Return a layer's cuts, with a gradient to the shares; ``scores_BNO`` are logits of groups, then of keys."""
        costs, (groups_BNS, keys_BNh) = self.costs, scores_BNO.detach().tensor_split([-cut_Bh.shape[1]], -1)
        margins = groups_BNS.view(*keys_BNh.shape, self.groups) - cut_Bh[:, None, :, None], keys_BNh - cut_Bh[:, None]
        slopes = [each.sigmoid() * (1 - each.sigmoid()) for each in margins]
        slope_BNh = (costs.group * slopes[0].sum(-1) + costs.key * slopes[1]) * learns_BN[..., None]
        bytes_B1 = learns_BN.sum(-1, keepdim=True) * (costs.dense * float(self.share))
        wanted_Bh = self.of_all()[layer].to(cut_Bh.device) * bytes_B1
        return cut_Bh - (wanted_Bh - wanted_Bh.detach()) / slope_BNh.sum(1).clamp(min=FLATTEST * costs.dense)
