"""VL-Cache: entries stay by the attention of the text after the image; layers with denser attention keep more.

Source: "VL-Cache: Sparsity and Modality-Aware KV Cache Compression for Vision-Language Model Inference Acceleration",
equations 1 and 2, Algorithm 1 and section 4.2; in the paper visual and text entries compete together (scope ``all``).
A reconstruction, since our copy has lost its equations: a layer's budget is scaled by 1 - sparsity over its mean, 1 %
to 100 % of its entries stay, and what these bounds take or leave moves between layers; sparsity is counted over what
the rows can see, and averaged over heads; scores are per key-value head; the recent window, 10 % of a layer's entries,
is part of them where the end of the prompt competes. Without an image the rows are those after the context. What the
paper compares with is a setting: the last 50 rows, equal budgets, a pyramid.

Legend: B batch, N cached rows of the prompt, H query heads, h key-value heads, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from subtoken_train.evictions.base import Eviction, layer_count, protect_last
from subtoken_train.evictions.budgets import competing_counts, divide_budget, pyramid_weights
from subtoken_train.evictions.observers import Blocks, over_groups, share_of, task_rows
from subtoken_train.functional.gather import last_marked
from subtoken_train.view.method import by_settings, setting
from subtoken_train.view.scores import Candidates, Scores
from subtoken_train.view.view import Need, View

Window = Literal["post_vision", "last"]
Budgets = Literal["sparsity", "uniform", "pyramid"]


@dataclass(frozen=True)
class VLCache(Eviction):
    """VL-Cache.

    Attributes:
        threshold: p of equation 1: attention below this share of its row's largest counts as zero.
        least: share of its entries that every layer keeps, where the budget has that; not with ``uniform`` budgets.
        recent: as many of the prompt's last entries as this share of what a layer keeps stay, whatever they score.
        window: whose attention counts: the ``post_vision`` rows, or the ``last`` ``window_size`` rows of the prompt.
        window_size: rows of a ``last`` window.
        budgets: how layers share: by ``sparsity``, ``uniform`` (each its own budget), or ``pyramid`` (falling linearly
            from the first layer to the last).
    """

    name: ClassVar[str] = "vl_cache"
    needs: ClassVar[frozenset[Need]] = frozenset({"blocks"})

    threshold: float = setting(0.01, 1e-9, 1)
    least: float = setting(0.01, 0, 1)
    recent: float = setting(0.1, 0, 1)
    window: Window = "post_vision"
    window_size: int = setting(50, 1)
    budgets: Budgets = "sparsity"

    def score(self, view: View) -> Scores:
        """Attention received from the window's rows, [B, h, N]; the weight is the layer's density."""
        last = self.window == "last"
        blocks = view.blocks(last_marked(view.entries_BN, self.window_size) if last else task_rows(view.regions_BN))
        sums_BHN, density_BH = post_vision_statistics(blocks, view.entries_BN, self.threshold)
        scores_BhN = over_groups(sums_BHN, view.key_BhNd.shape[1])
        nothing_BN = torch.zeros_like(view.entries_BN)
        notes = {"entries": view.entries_BN, "in_scope": view.in_scope_BN & view.entries_BN}
        return Scores(scores_BhN, nothing_BN, density_BH.mean(1), notes)

    across_layers = by_settings(lambda self: self.budgets != "uniform")

    def counts(self, scores: list[Scores], candidates: Candidates) -> Tensor:
        if self.budgets == "uniform":
            return candidates.budget_LB
        weight_LB = torch.stack([each.weight_B for each in scores if each.weight_B is not None])
        if self.budgets == "pyramid":
            weight_LB = pyramid_weights(weight_LB)
        most_LB = competing_counts(candidates)
        least_LB = torch.minimum((self.least * most_LB).long(), candidates.budget_LB).clamp(min=1)
        return divide_budget(weight_LB * candidates.budget_LB, candidates.budget_LB.sum(0), least_LB, most_LB)

    def at_budget(self, scores: Scores, competes_BN: Tensor, count_Bh: Tensor) -> Scores:
        """Protect the window, whose length follows from what the layer keeps."""
        kept_B = layer_count(count_Bh) + (scores.notes["in_scope"] & ~competes_BN).sum(-1)
        window_B = share_of(kept_B, self.recent)
        return protect_last(scores, scores.notes["entries"], window_B)


def post_vision_statistics(blocks: Blocks, entries_BN: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Column sums of the rows' attention [B, H, N] in fp32, and how dense it is (1 - equation 2), [B, H].

    Attention counts as zero below ``threshold`` of its row's largest (equation 1).
    """
    visible_BN = entries_BN.cumsum(-1)
    sums_BHN = passed_BH = seen_B = torch.zeros((), device=entries_BN.device)
    for index_BW, probability_BHWN in blocks:
        largest_BHW1 = probability_BHWN.amax(-1, keepdim=True)
        passes_BHWN = (probability_BHWN >= threshold * largest_BHW1) & (probability_BHWN > 0)
        sums_BHN = sums_BHN + probability_BHWN.sum(2)
        passed_BH = passed_BH + passes_BHWN.sum((2, 3))
        seen_B = seen_B + (visible_BN.gather(1, index_BW.clamp(min=0)) * (index_BW >= 0)).sum(-1)
    return sums_BHN, passed_BH / seen_B[:, None].clamp(min=1)
