"""SnapKV, and PyramidKV, which gives lower layers more of its budget.

Legend: B batch, N cached rows of the prompt, H query heads, h key-value heads, W rows of the window, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from subtoken_train.evictions.base import Eviction
from subtoken_train.evictions.budgets import competing_counts, divide_budget, protected_counts
from subtoken_train.evictions.observers import (
    GroupReduction,
    Pooling,
    kernel_setting,
    neighbours_pooled,
    over_groups,
    window_rows,
    window_setting,
)
from subtoken_train.view.method import by_settings, setting
from subtoken_train.view.scores import Candidates, Scale, Scores
from subtoken_train.view.view import Need, Online, View

PoolPer = Literal["query_head", "kv_head"]
RowReduction = Literal["sum", "mean"]


@dataclass(frozen=True)
class SnapKV(Eviction):
    """SnapKV (Li et al., 2024): the last rows of the prompt say which entries matter, neighbours together.

    Source: Listing 1 of "SnapKV: LLM Knows What You are Looking for Before Generation" and its code: attention of the
    last ``window`` rows, summed over them, smoothed over neighbouring entries; the window itself stays. What
    re-implementations do otherwise is a setting each; the defaults are those of the released class. Every key-value
    head has one set, where the released code repeats keys for all query heads. ``eviction_every`` evicts while decoding
    too, by the rows decoded since the last time. Where only the context competes, what follows it observes and costs no
    budget. Where nothing follows it, or everything competes, the window is inside the budget: one as long as the budget
    leaves no choice, one that is a share of it always does.

    Attributes:
        window: last entries of the prompt that observe, and always stay: a whole number, or, between 0 and 1, their
            share of the layer's budget, rounded down, 1 at least.
        kernel: entries that are pooled together, odd.
        pooling: ``avg`` (what hangs over an edge counts as 0) or ``max`` (its ties go to the lower index).
        pool_per: pool the scores of every ``query_head`` and then reduce a group, or a ``kv_head``'s reduced scores.
        rows: ``sum`` or ``mean`` over the window's rows; a scale that changes no set of a head, unless ``critical``
            adds its epsilon, or a threshold decides, which needs ``mean``.
        group: over the query heads of a key-value head, ``mean`` or ``max``.
    """

    name: ClassVar[str] = "snapkv"
    needs: ClassVar[frozenset[Need]] = frozenset({"rows"})

    window: int | float = window_setting(64)
    kernel: int = kernel_setting(5)
    pooling: Pooling = "avg"
    pool_per: PoolPer = "query_head"
    rows: RowReduction = "sum"
    group: GroupReduction = "mean"

    online = by_settings(lambda self: Online(rows=self.window if isinstance(self.window, int) else None))

    observing_rows = by_settings(lambda self: self.window if isinstance(self.window, int) else None)

    absolute = by_settings(
        lambda self: Scale(log=True, high=0.0) if self.rows == "mean" and isinstance(self.window, int) else None
    )

    def score(self, view: View) -> Scores:
        window_BN, index_BW = window_rows(view, self.window)
        scores = view.rows(index_BW).sum(2)
        if self.rows == "mean":
            scores = scores / (index_BW >= 0).sum(-1).clamp(min=1)[:, None, None]
        kv_heads, before_BN = view.key_BhNd.shape[1], view.entries_BN & ~window_BN
        how = before_BN, self.kernel, self.pooling
        if self.pool_per == "query_head":
            scores = over_groups(neighbours_pooled(scores, *how), kv_heads, self.group)
        else:
            scores = neighbours_pooled(over_groups(scores, kv_heads, self.group), *how)
        return Scores(scores, window_BN)


Convention = Literal["exact", "original", "kvpress"]


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """PyramidKV (Cai et al., 2024): SnapKV's scores, with more entries in lower layers and fewer in higher ones.

    Source: section 3.2 of "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling" and its
    code: without the window every layer has ``base`` entries on average; the last layer gets ``base // beta``, the
    first what makes their mean ``base``, those between lie on a line, flatter where a layer has fewer entries. The code
    rounds the line's step down, so that all layers together keep up to half as much again; the default meets the budget
    exactly.

    Attributes:
        beta: how steep the pyramid is: the last layer keeps ``base // beta`` entries beside the window; 1 is flat.
        budgets: ``exact``: the original's line, all layers together keep exactly the budget. ``original``: with the
            released code's whole-number step; keeps more than the budget unless layers - 1 divides the line's fall.
            ``kvpress``: the line runs through whole budgets, the window inside; off by what rounding leaves.
    """

    name: ClassVar[str] = "pyramidkv"
    across_layers: ClassVar[bool] = True
    online: ClassVar[Online | None] = None
    absolute: ClassVar[Scale | None] = None

    beta: int = setting(20, 1)
    budgets: Convention = "exact"

    def counts(self, scores: list[Scores], candidates: Candidates) -> Tensor:
        window_LB = protected_counts(scores, candidates)
        # on the CPU: few numbers, float64, and whole-number division
        budget_LB, entries_LB = candidates.budget_LB.cpu(), competing_counts(candidates).cpu()
        count_LB = PYRAMIDS[self.budgets](budget_LB, entries_LB, window_LB.cpu(), self.beta)
        return count_LB.to(window_LB.device)


def exact_pyramid(budget_LB: Tensor, entries_LB: Tensor, window_LB: Tensor, beta: int) -> Tensor:
    """The original's line in real numbers, rounded so that the layers of a sample keep exactly their budgets' sum.

    Layer l moves from its own budget by (L - 1 - 2 l) / (L - 1) of the largest shift that every layer has room for, so
    layers may differ in budget and entries; every layer keeps 1 at least.
    """
    base_LB = budget_LB - window_LB
    least_LB = (window_LB + base_LB // beta).clamp(min=1)
    layer_L1 = torch.arange(len(budget_LB), dtype=torch.float64)[:, None]
    slope_L1 = (len(budget_LB) - 1 - 2 * layer_L1) / max(len(budget_LB) - 1, 1)
    free_LB = torch.where(slope_L1 > 0, entries_LB - budget_LB, budget_LB - least_LB)
    shift_B = torch.where(slope_L1 == 0, torch.inf, free_LB / slope_L1.abs()).amin(0).clamp(min=0)
    flat_B = (entries_LB < 2 * base_LB).any(0) | shift_B.isinf()
    line_LB = budget_LB + slope_L1 * shift_B.masked_fill(flat_B, 0)
    return divide_budget(line_LB, budget_LB.sum(0), torch.ones_like(budget_LB), entries_LB)


def original_pyramid(budget_LB: Tensor, entries_LB: Tensor, window_LB: Tensor, beta: int) -> Tensor:
    """As the released code counts; a budget that is no more than the window, where that fails, stays as it is."""
    layers = len(budget_LB)
    base_LB, before_LB = budget_LB - window_LB, entries_LB - window_LB
    most_LB = torch.minimum(2 * base_LB - base_LB // beta, before_LB)
    step_LB = 2 * (most_LB - base_LB) // max(layers - 1, 1)
    count_LB = most_LB - torch.arange(layers)[:, None] * step_LB + window_LB
    flat_LB = (base_LB <= 0) | (entries_LB < 2 * base_LB)
    return budget_LB if layers == 1 else torch.where(flat_LB, budget_LB, count_LB)


def kvpress_pyramid(budget_LB: Tensor, entries_LB: Tensor, window_LB: Tensor, beta: int) -> Tensor:
    """As kvpress counts: the line holds the window, is rounded half to even, and is flat where it does not fit."""
    layers, budget_LB = len(budget_LB), budget_LB.double()
    most_LB, least_LB = 2 * budget_LB - budget_LB / beta, budget_LB / beta
    capped_LB = most_LB >= entries_LB - window_LB
    most_LB = torch.where(capped_LB, entries_LB - window_LB, most_LB)
    least_LB = torch.where(capped_LB, 2 * budget_LB - most_LB, least_LB)
    line_LB = most_LB - torch.arange(layers)[:, None] * ((most_LB - least_LB) / max(layers - 1, 1))
    fits_LB = (entries_LB >= most_LB) & (most_LB >= least_LB) & (least_LB >= window_LB)
    return torch.where(fits_LB, line_LB if layers > 1 else budget_LB, budget_LB).round().long()


PYRAMIDS = {"exact": exact_pyramid, "original": original_pyramid, "kvpress": kvpress_pyramid}
