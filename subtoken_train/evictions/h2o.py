"""H2O, and the multimodal methods that choose by its sums: LOOK-M and MEDA.

Legend: B batch, N cached rows of the prompt, H query heads, h key-value heads, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from subtoken_train.evictions.base import Eviction, layer_count, protect_last
from subtoken_train.evictions.budgets import competing_counts, divide_budget
from subtoken_train.evictions.observers import GroupReduction, column_sums, over_groups, share_of, window_setting
from subtoken_train.functional.attention_statistics import attention_blocks
from subtoken_train.functional.merging import Merge
from subtoken_train.types import Region
from subtoken_train.view.method import setting
from subtoken_train.view.scores import Candidates, Scores
from subtoken_train.view.view import Need, Online, View


@dataclass(frozen=True)
class H2O(Eviction):
    """H2O (Zhang et al., 2023): heavy hitters, the entries that gathered most attention, and the recent ones.

    Source: Algorithm 1 of "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models", once,
    after the prompt: an entry's score is the sum of its column of the causal attention matrix, which is computed a
    second time for it, a block of rows at a time. The paper gives recent entries half of the budget; its code and
    KVCache-Factory a fixed number (``window``). Where only the context competes the prompt's last entries stay anyway
    and cost no budget. While tokens are decoded (``eviction_every``) sums go on. Samples are not added up, as that code
    does.

    Attributes:
        recent_share: as many of the prompt's last entries as this share of the budget always stay, in [0, 1], rounded
            down.
        window: if not 0, that many of the prompt's last entries stay instead, or as many as the budget has; between 0
            and 1 a share of the budget, which is ``recent_share`` by the name that it has in other methods.
        normalise: divide an entry's sum by the number of rows that can see it (kvpress, ``observed_attention``).
        group: over the query heads of a key-value head, ``mean`` or ``max``; the paper has no grouped heads.
    """

    name: ClassVar[str] = "h2o"
    online: ClassVar[Online | None] = Online()
    needs: ClassVar[frozenset[Need]] = frozenset({"blocks"})

    recent_share: float = setting(0.5, 0, 1)
    window: int | float = window_setting(0, 0)
    normalise: bool = False
    group: GroupReduction = "mean"

    def score(self, view: View) -> Scores:
        entries_BN = view.entries_BN
        sums, kv_heads = column_sums(view.blocks(entries_BN)), view.key_BhNd.shape[1]
        if self.group == "mean":  # a sum for each key-value head is enough to go on with
            sums = over_groups(sums, kv_heads)
        if view.carried is not None:
            sums = sums + view.carried
        scores = sums / view.viewers().clamp(min=1)[:, None] if self.normalise else sums
        scores_BhN = over_groups(scores, kv_heads, self.group)
        notes = {"entries": entries_BN, "in_scope": view.in_scope_BN & entries_BN}
        return Scores(scores_BhN, torch.zeros_like(entries_BN), notes=notes, carried=sums)

    def at_budget(self, scores: Scores, competes_BN: Tensor, count_Bh: Tensor) -> Scores:
        """Protect the recent window; a last row that is in scope is one of the budget's entries, and of the window."""
        count_B = layer_count(count_Bh) + (scores.notes["in_scope"] & ~competes_BN).sum(-1)
        if isinstance(self.window, int) and self.window:
            recent_B = torch.full_like(count_B, self.window)
        else:
            recent_B = share_of(count_B, self.window or self.recent_share)
        return protect_last(scores, scores.notes["entries"], recent_B)


@dataclass(frozen=True)
class LookM(H2O):
    """LOOK-M (Wan et al., 2024): text stays before any visual entry, and what goes is merged into what stays.

    Source: "LOOK-M: Look-Once Optimization in KV Cache for Efficient Multimodal Long-Context Inference" (2406.18139)
    and its code (SUSTechBruce/LOOK-M @ecf0f51). H2O's scores and recent share; to text's the largest visual score of
    the head is added (twice, so that rounding changes nothing). What a head drops joins the kept entry whose key is
    most like its own, by the merge ``pivot`` unless another is asked for. Without an image it is H2O with merging.

    The budget is exact, where the release keeps all text whatever the budget. It takes 65,516 from visual scores, which
    in half precision leaves steps of 32. Its averaging and weighting pair entries with other entries' keys; neither is
    offered. While decoding, generated entries are text, and nothing is merged.
    """

    name: ClassVar[str] = "look_m"
    merges: ClassVar[Merge] = "pivot"

    def score(self, view: View) -> Scores:
        found = super().score(view)
        visual_B1N = (view.regions_BN == Region.VISUAL)[:, None]
        raised_Bh1 = 2 * found.scores_BhN.masked_fill(~visual_B1N, 0.0).amax(-1, keepdim=True)
        text_B1N = view.entries_BN[:, None] & ~visual_B1N
        return replace(found, scores_BhN=torch.where(text_B1N, found.scores_BhN + raised_Bh1, found.scores_BhN))


LEAST = 0.01  # share of its entries that every layer keeps, where the budget has that


@dataclass(frozen=True)
class MEDA(LookM):
    """MEDA (Wan et al., 2025): layers whose text and image look at each other widely keep more, by LOOK-M's choice.

    Source: "MEDA: Dynamic KV Cache Allocation for Efficient Multimodal Long-Context Inference" (2502.17599) and its
    code (AIoT-MLSys-Lab/MEDA @0e1a53b). A layer's cross-modal entropy is that of text's attention to the visual entries
    plus that of visual rows' attention to text, mean over rows and heads; its softmax over the layers divides the
    budget. Entries are chosen by LOOK-M, and merged by a plain mean (the merge ``average``).

    A reconstruction from the abstract and a function of the release that nothing calls: each softmax runs over the
    other kind alone, wherever it stands. What the release runs takes the entropy of the whole causal attention, clips
    shares and loses the rest, and keeps all text; here the budget is exact. Prompts without an image are refused.
    """

    name: ClassVar[str] = "meda"
    across_layers: ClassVar[bool] = True
    online: ClassVar[Online | None] = None
    merges: ClassVar[Merge] = "average"
    needs_image: ClassVar[bool] = True

    def score(self, view: View) -> Scores:
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
    """Entropy of marked rows' attention over the marked keys alone, later ones too, mean over rows and heads, [B]."""
    total_B = torch.zeros(len(rows_BN), device=rows_BN.device)
    everywhere = rows_BN.shape[1]  # as if all keys lay before the first row
    if not bool(rows_BN.any()):
        return total_B
    states = view.query_BHNd, view.key_BhNd
    for _, probability_BHWN in attention_blocks(*states, rows_BN, keys_BN, view.scale, offset=everywhere):
        total_B += torch.special.entr(probability_BHWN).sum((2, 3)).mean(1)
    return total_B / rows_BN.sum(-1).clamp(min=1)
