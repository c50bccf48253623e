"""Elastic Cache, and PrefixKV, which divides the budget between layers by its scores.

Legend: B batch, N cached rows of the prompt, H query heads, L layers, R tabulated budgets.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from subtoken_train.calibrations import CalibratedNumbers, check_table, check_table_shape, table_words
from subtoken_train.evictions.base import Eviction
from subtoken_train.evictions.budgets import competing_counts, divide_budget, protected_counts
from subtoken_train.evictions.observers import column_sums
from subtoken_train.functional.gather import last_marked
from subtoken_train.functional.merging import Merge
from subtoken_train.view.method import setting
from subtoken_train.view.scores import Candidates, Scores
from subtoken_train.view.view import Need, View


@dataclass(frozen=True)
class Elastic(Eviction):
    """Elastic Cache (Liu et al., 2024): entries that gathered most attention stay, as anchors of those that go.

    Source: "Efficient Inference of Vision Instruction-Following Models with Elastic Cache" and its code: the attention
    that an entry receives, summed over all rows, mean over all query heads, one set for a layer. A dropped entry is
    merged into the nearest that stays (the merge ``position``) unless another merge is asked for. The released code
    takes ``argsort`` for a rank and so keeps entries by chance (a test shows it); here the best scores stay, as the
    paper says.

    Attributes:
        sinks: first entries of the prompt that always stay, inside the budget.
        recent: last entries that always stay, inside the budget where they compete.
    """

    name: ClassVar[str] = "elastic"
    needs: ClassVar[frozenset[Need]] = frozenset({"blocks"})
    heads_share: ClassVar[bool] = True
    merges: ClassVar[Merge] = "position"

    sinks: int = setting(1)
    recent: int = setting(1)

    def score(self, view: View) -> Scores:
        entries_BN = view.entries_BN
        sums_BHN = column_sums(view.blocks(entries_BN))
        ends_BN = entries_BN & (entries_BN.cumsum(-1) <= self.sinks) | last_marked(entries_BN, self.recent)
        return Scores(sums_BHN.mean(1, keepdim=True), ends_BN)


@dataclass(frozen=True)
class LayerShares(CalibratedNumbers):
    """Shares of their entries that layers keep under some budgets.

    ``keep`` [R] are shares of all layers' entries, rising, above 0 and below 1; ``shares`` [R, L] what each layer then
    keeps.
    """

    keep: list[float]
    shares: list[list[float]]

    def __post_init__(self) -> None:
        check_table("shares", self.shares, 0, 1)
        if len(self.keep) != len(self.shares):
            raise ValueError(f"keep has {len(self.keep)} budgets and shares {len(self.shares)} rows; a row for each")
        if any(not low < high for low, high in pairwise([0.0, *self.keep, 1.0])):
            raise ValueError("keep must rise, above 0 and below 1")

    def check_shape(self, num_layers: int, num_kv_heads: int, head_dim: int) -> None:
        check_table_shape("shares", self.shares[0], num_layers)

    def words(self) -> str:
        return table_words("share of every layer, a line per budget", self.shares)

    def at(self, keep_B: Tensor) -> Tensor:
        """Shares under the samples' own budgets, float64 [L, B]: straight lines between what is tabulated, 0 and 1."""
        layers = len(self.shares[0])
        keep_R = torch.tensor([0.0, *self.keep, 1.0], dtype=torch.float64)
        share_RL = torch.tensor([[0.0] * layers, *self.shares, [1.0] * layers], dtype=torch.float64)
        keep_B = keep_B.double().cpu()
        above_B = torch.searchsorted(keep_R, keep_B).clamp(1, len(keep_R) - 1)
        low_B, high_B = keep_R[above_B - 1], keep_R[above_B]
        part_B1 = ((keep_B - low_B) / (high_B - low_B))[:, None]
        return torch.lerp(share_RL[above_B - 1], share_RL[above_B], part_B1).T


@dataclass(frozen=True)
class PrefixKV(Elastic):
    """PrefixKV (Wang et al., 2024): Elastic Cache's scores; layers keep as many entries as the same attention needs.

    Source: "PrefixKV: Adaptive Prefix KV Cache is What Vision Instruction-Following Models Need for Efficient
    Generation" and its code. What a layer's best entries hold together of its attention is a rising curve; one level
    for all layers says how far each prefix reaches, so that all together are the budget. The release bisects for the
    level; here all curves' values are sorted once, which gives it exactly. Shares found offline, as in the paper, stand
    in the file ``calibration`` (``subtoken-train calibrate prefixkv``). Nothing is merged unless it is asked for.

    Attributes:
        calibration: file of the layers' shares, which then hold for every prompt; None: every prompt's own prefixes.
    """

    name: ClassVar[str] = "prefixkv"
    across_layers: ClassVar[bool] = True
    calibrates: ClassVar[type[CalibratedNumbers]] = LayerShares
    merges: ClassVar[Merge] = "none"

    calibration: str | None = None

    def counts(self, scores: list[Scores], candidates: Candidates) -> Tensor:
        most_LB, total_B = competing_counts(candidates), candidates.budget_LB.sum(0)
        if self.calibrated is not None:
            share_LB = self.calibrated.numbers.at(total_B / most_LB.sum(0).clamp(min=1)).float().to(most_LB.device)
            return divide_budget(share_LB * most_LB, total_B, most_LB.clamp(max=1), most_LB)
        layers = list(zip(scores, candidates.competes_LBN, strict=True))
        protected_LB = protected_counts(scores, candidates)
        curves = [prefix_curve(layer.scores_BhN[:, 0], competes_BN) for layer, competes_BN in layers]
        return prefix_counts(curves, total_B, protected_LB, most_LB)


def prefix_curve(scores_BN: Tensor, competes_BN: Tensor) -> Tensor:
    """Share of the competing attention that the best entries hold together, [B, N], rising to 1, then ``inf``."""
    ranked_BN = scores_BN.masked_fill(~competes_BN, 0.0).sort(dim=-1, descending=True).values
    held_BN = ranked_BN.cumsum(-1)
    held_BN = held_BN / held_BN[:, -1:].clamp(min=torch.finfo(torch.float32).tiny)
    within_BN = torch.arange(held_BN.shape[-1], device=held_BN.device) < competes_BN.sum(-1, keepdim=True)
    return held_BN.masked_fill(~within_BN, torch.inf)


def prefix_counts(curves: list[Tensor], total_B: Tensor, protected_LB: Tensor, most_LB: Tensor) -> Tensor:
    """Entries per layer that hold the same share of each layer's attention, int64 [L, B], whose sum is the total.

    A prefix ends with the first entry at which its curve reaches the level; protected entries come on top. Raising the
    level adds one entry of one layer at a time, in the order of the curves' values, ties to the lower layer.
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
