"""PrefixKV (Wang et al., 2024): Elastic Cache's scores, and as many entries in each layer as the same attention needs.

Source: "PrefixKV: Adaptive Prefix KV Cache is What Vision Instruction-Following Models Need for Efficient Generation"
and its released code. A layer's entries are sorted by their score; what the best of them hold together of the layer's
attention is a rising curve. One level for all layers says how far each layer's prefix reaches, so that all prefixes
together are the budget. The release searches the level by bisection, to within 5 entries, which may never end, and then
scales; here all curves' values are sorted once, which gives the exact level and the exact budget.
The paper finds the layers' shares offline, from 10 samples: ``calibration`` names such a file
(``subtoken-train calibrate prefixkv``). Without one every prompt has its own, as in the release's profiling.
What it does not do: as ``elastic``.

Legend: B batch, N cached rows of the prompt, L layers, R tabulated budgets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from subtoken_train.evictions.base import Candidates, LayerScores
from subtoken_train.evictions.budgets import competing_counts, divide_budget
from subtoken_train.evictions.elastic import Elastic


@dataclass(frozen=True)
class PrefixKV(Elastic):
    """Elastic's scores under budgets per layer; see ``Elastic`` for the other settings."""

    name: ClassVar[str] = "prefixkv"

    def counts(self, scores: list[LayerScores], candidates: Candidates) -> Tensor:
        """Entries per layer, int64 [L, B]: the prompt's own prefixes."""
        protected_LB = torch.stack(
            [
                (layer.protected_BN & competes_BN).sum(-1)
                for layer, competes_BN in zip(scores, candidates.competes_LBN, strict=True)
            ]
        )
        curves = [
            prefix_curve(layer.scores_BhN[:, 0], competes_BN)
            for layer, competes_BN in zip(scores, candidates.competes_LBN, strict=True)
        ]
        return prefix_counts(curves, candidates.budget_LB.sum(0), protected_LB, competing_counts(candidates))


def prefix_curve(scores_BN: Tensor, competes_BN: Tensor) -> Tensor:
    """Share of the competing entries' attention that the best of them hold together, [B, N] in fp32, rising to 1.

    ``inf`` after the last entry. Scores are 0 or more.
    """
    ranked_BN = scores_BN.masked_fill(~competes_BN, 0.0).sort(dim=-1, descending=True).values
    held_BN = ranked_BN.cumsum(-1)
    held_BN = held_BN / held_BN[:, -1:].clamp(min=torch.finfo(torch.float32).tiny)
    within_BN = torch.arange(held_BN.shape[-1], device=held_BN.device) < competes_BN.sum(-1, keepdim=True)
    return held_BN.masked_fill(~within_BN, torch.inf)


def prefix_counts(curves: list[Tensor], total_B: Tensor, protected_LB: Tensor, most_LB: Tensor) -> Tensor:
    """Entries per layer that hold the same share of each layer's attention, int64 [L, B], whose sum is the total.

    A layer's prefix at a level ends with the first entry at which its curve reaches the level; protected entries come
    on top of it, up to what the layer has. Raising the level adds one entry of one layer at a time, in the order of the
    curves' values: as many of them as the total pays for. Equal values go to the lower layer.

    Args:
        curves: per layer, [B, N_l], see ``prefix_curve``.
        total_B: entries to spend, int64; less than one for each layer spends those, more than there are spends these.
        protected_LB: of the entries that compete, int64.
        most_LB: entries that compete, int64.
    """
    least_LB = torch.minimum(protected_LB + 1, most_LB)
    # entry k of the curve, from 0, is what the prefix of k + 1 entries holds: passing it makes the prefix k + 2 long
    free_LB = most_LB - least_LB
    values, layers = [], []
    for layer, curve_BN in enumerate(curves):
        within_BN = torch.arange(curve_BN.shape[-1], device=curve_BN.device) < free_LB[layer][:, None]
        values.append(curve_BN.masked_fill(~within_BN, torch.inf))
        layers += [layer] * curve_BN.shape[-1]
    order = torch.cat(values, -1).sort(dim=-1, stable=True).indices
    passed_B1 = torch.minimum(total_B - least_LB.sum(0), free_LB.sum(0)).clamp(min=0)[:, None]
    chosen = torch.zeros_like(order, dtype=torch.bool).scatter_(
        -1, order, (torch.arange(order.shape[-1], device=order.device) < passed_B1).expand_as(order)
    )
    of_layer = torch.tensor(layers, device=order.device).expand_as(order)
    added_BL = torch.zeros(len(total_B), len(curves), dtype=torch.long, device=order.device)
    added_LB = added_BL.scatter_add(-1, of_layer, chosen.long()).T
    # where even the shortest prefixes are too much, all layers give way alike
    return divide_budget(least_LB + added_LB, total_B, most_LB.clamp(max=1), most_LB)
