"""MEDA (Wan et al., 2025): layers whose text and image look at each other widely keep more, by LOOK-M's choice.

Source: "MEDA: Dynamic KV Cache Allocation for Efficient Multimodal Long-Context Inference" (2502.17599) and its
released code (AIoT-MLSys-Lab/MEDA @0e1a53b). A layer's cross-modal entropy is that of text's attention to the visual
entries plus that of visual rows' attention to text, mean over rows and heads. Its softmax over the layers divides the
budget. Entries are chosen by LOOK-M, and merged by a plain mean (the merge ``average``).

A reconstruction from the abstract and a function of the release that nothing calls: each softmax runs over the other
kind alone, wherever it stands. What the release runs takes the entropy of the whole causal attention, clips shares and
loses the rest, evicts at the first decoded token and keeps all text; here the budget is exact. Prompts without an image
are refused. Nothing is evicted while decoding.

Legend: B batch, N cached rows of the prompt, H query heads, W rows of a block, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from subtoken_train.evictions.budgets import competing_counts, divide_budget
from subtoken_train.evictions.look_m import LookM
from subtoken_train.functional.attention_statistics import attention_blocks
from subtoken_train.functional.merging import Merge
from subtoken_train.types import Region
from subtoken_train.view.scores import Candidates, Scores
from subtoken_train.view.view import Online, View

LEAST = 0.01  # share of its entries that every layer keeps, where the budget has that


@dataclass(frozen=True)
class MEDA(LookM):
    """LOOK-M's choice under budgets by cross-modal entropy; see ``H2O`` for the settings."""

    name: ClassVar[str] = "meda"
    across_layers: ClassVar[bool] = True
    online: ClassVar[Online | None] = None
    merges: ClassVar[Merge] = "average"
    needs_image: ClassVar[bool] = True

    def score(self, view: View) -> Scores:
        """LOOK-M's scores, [B, h, N]; the weight is the layer's cross-modal entropy, in nats."""
        visual_BN = view.regions_BN == Region.VISUAL
        text_BN = view.entries_BN & ~visual_BN
        entropy_B = entropy_of(view, text_BN, visual_BN) + entropy_of(view, visual_BN, text_BN)
        return replace(super().score(view), weight_B=entropy_B, carried=None)

    def counts(self, scores: list[Scores], candidates: Candidates) -> Tensor:
        entropy_LB = torch.stack([each.weight_B for each in scores if each.weight_B is not None])
        budget_LB, most_LB = candidates.budget_LB, competing_counts(candidates)
        least_LB = torch.minimum((LEAST * most_LB).long(), budget_LB).clamp(min=1)
        return divide_budget(entropy_LB.softmax(0) * budget_LB, budget_LB.sum(0), least_LB, most_LB)


def entropy_of(view: View, rows_BN: Tensor, keys_BN: Tensor) -> Tensor:
    """Entropy of the marked rows' attention over the marked keys alone, those after a row too, [B] in nats.

    Mean over rows and heads; 0 without rows or keys.
    """
    total_B = torch.zeros(len(rows_BN), device=rows_BN.device)
    everywhere = rows_BN.shape[1]  # as if all keys lay before the first row
    if not bool(rows_BN.any()):
        return total_B
    states = view.query_BHNd, view.key_BhNd
    for _, probability_BHWN in attention_blocks(*states, rows_BN, keys_BN, view.scale, offset=everywhere):
        total_B += torch.special.entr(probability_BHWN).sum((2, 3)).mean(1)
    return total_B / rows_BN.sum(-1).clamp(min=1)
