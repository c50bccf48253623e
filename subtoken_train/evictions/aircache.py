"""AirCache: visual entries stay by how much a few key text tokens attend to them; layers with more of it keep more.

Source: "AirCache: Activating Inter-modal Relevancy KV Cache Compression for Efficient LVLM Inference", equations 4-11
and Table 5. One shot, after the prompt; only visual entries are compressed, and text that competes (scope ``all``) is
protected. A reconstruction, since our copy of the paper has lost its equations: instruction text is what follows the
last visual token; heads are averaged, and all heads of a layer share a set; attention between elite tokens is causal;
skewness uses the sample deviation, and a negative one counts as 0; strength and skewness are divided by their mean over
the layers, so that the budget is met. Merging (Table 11) is the option ``merge`` of any eviction.

Legend: B batch, N cached rows of the prompt, H query heads, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from subtoken_train.evictions.base import Eviction
from subtoken_train.evictions.budgets import competing_counts, divide_budget, pyramid_weights
from subtoken_train.evictions.observers import Blocks, column_sums, task_rows
from subtoken_train.functional.gather import last_marked
from subtoken_train.types import Region
from subtoken_train.view.method import by_settings, setting
from subtoken_train.view.scores import Candidates, Scores
from subtoken_train.view.view import Need, View

Window = Literal["elite", "last", "text", "visual"]
Budgets = Literal["both", "strength", "skewness", "uniform", "pyramid"]


@dataclass(frozen=True)
class AirCache(Eviction):
    """AirCache, and the alternatives of its Table 5.

    Attributes:
        alpha: a text token is elite if the last one attends to it by this share of its largest attention (equation 5):
            0 takes all text, 1 the best alone.
        window: who observes the visual tokens: ``elite`` text; the ``last`` ``window_size`` text tokens; all ``text``;
            the last ``window_size`` ``visual`` tokens.
        window_size: tokens of a ``last`` or ``visual`` window (the paper: 16 or 32).
        budgets: how layers share: ``both`` strength and skewness, one of them, ``uniform`` (each its own budget), or
            ``pyramid`` (falling linearly from the first layer to the last).
    """

    name: ClassVar[str] = "aircache"
    needs: ClassVar[frozenset[Need]] = frozenset({"rows", "blocks"})
    heads_share: ClassVar[bool] = True
    needs_image: ClassVar[bool] = True

    alpha: float = setting(0.9, 0, 1)
    window: Window = "elite"
    window_size: int = setting(32, 1)
    budgets: Budgets = "both"

    def score(self, view: View) -> Scores:
        """Importance of the visual entries, [B, 1, N]; ``notes`` has the layer's strength and skewness."""
        visual_BN = view.regions_BN == Region.VISUAL
        observers_BN = self.observers(view)
        importance_BN = importance(view.blocks(observers_BN, visual_BN | observers_BN), observers_BN, visual_BN)
        notes = {"strength": importance_BN.sum(-1), "skewness": skewness(importance_BN, visual_BN)}
        return Scores(importance_BN[:, None], view.entries_BN & ~visual_BN, notes=notes)

    def observers(self, view: View) -> Tensor:
        """Rows of the observation window, bool [B, N]; a layer without visual entries has nothing to observe."""
        text_BN = task_rows(view.regions_BN)
        if self.window == "text":
            return text_BN
        if self.window == "last":
            return last_marked(text_BN, self.window_size)
        if self.window == "visual":
            visual_BN = view.regions_BN == Region.VISUAL
            return last_marked(torch.where(visual_BN.any(-1, keepdim=True), visual_BN, text_BN), self.window_size)
        return elite_tokens(view.rows(view.last_rows(1), text_BN)[:, :, 0].mean(1), text_BN, self.alpha)

    across_layers = by_settings(lambda self: self.budgets != "uniform")

    def counts(self, scores: list[Scores], candidates: Candidates) -> Tensor:
        strength, skewness = (torch.stack([each.notes[note] for each in scores]) for note in ("strength", "skewness"))
        weight_LB = layer_weights(strength, skewness, self.budgets) * candidates.budget_LB
        least_LB = torch.ones_like(candidates.budget_LB)
        return divide_budget(weight_LB, candidates.budget_LB.sum(0), least_LB, competing_counts(candidates))


def elite_tokens(attention_BN: Tensor, text_BN: Tensor, alpha: float) -> Tensor:
    """Text to which the last token attends by ``alpha`` of its largest attention or more (equation 5), bool [B, N]."""
    largest_B1 = attention_BN.masked_fill(~text_BN, 0.0).amax(-1, keepdim=True)
    return text_BN & (attention_BN >= alpha * largest_B1)


def importance(blocks: Blocks, observers_BN: Tensor, visual_BN: Tensor) -> Tensor:
    """Mean attention of the observers to each visual entry (equations 7 and 8), over heads too, [B, N]; 0 elsewhere."""
    rows_B1 = observers_BN.sum(-1, keepdim=True).clamp(min=1)
    return (column_sums(blocks).mean(1) / rows_B1).masked_fill(~visual_BN, 0.0)


def skewness(importance_BN: Tensor, visual_BN: Tensor) -> Tensor:
    """Adjusted Fisher-Pearson skewness of visual importance (equation 10), [B]; 0 of fewer than 3, or equals."""
    count_B = visual_BN.sum(-1)
    mean_B1 = importance_BN.sum(-1, keepdim=True) / count_B[:, None].clamp(min=1)
    away_BN = (importance_BN - mean_B1).masked_fill(~visual_BN, 0.0)
    deviation_B = (away_BN.square().sum(-1) / (count_B - 1).clamp(min=1)).sqrt()
    varies_B = (count_B >= 3) & (deviation_B > 1e-6 * mean_B1[:, 0])  # less is rounding of equal numbers
    cubes_B = (away_BN / deviation_B.masked_fill(~varies_B, 1.0)[:, None]).pow(3).sum(-1)
    factor_B = count_B / ((count_B - 1) * (count_B - 2)).clamp(min=1)
    return torch.where(varies_B, factor_B * cubes_B, 0.0)


def layer_weights(strength_LB: Tensor, skewness_LB: Tensor, budgets: Budgets) -> Tensor:
    """The factor of each layer's budget (equation 11 over r), [L, B]; the mean over the layers is 1."""
    if budgets == "uniform":
        return torch.ones_like(strength_LB)
    if budgets == "pyramid":
        return pyramid_weights(strength_LB)
    strength_LB, skewness_LB = _over_mean(strength_LB), _over_mean(skewness_LB.clamp(min=0))
    if budgets == "both":
        return (strength_LB + skewness_LB) / 2
    return strength_LB if budgets == "strength" else skewness_LB


def _over_mean(value_LB: Tensor) -> Tensor:
    mean_1B = value_LB.mean(0, keepdim=True)
    return torch.where(mean_1B > 0, value_LB / mean_1B.masked_fill(mean_1B <= 0, 1.0), 1.0)
