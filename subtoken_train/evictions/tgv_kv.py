"""TGV-KV: text says which visual entries matter and which layers need them; text itself is evicted last.

Source: "TGV-KV: Text-Grounded KV Eviction for Vision-Language Models" (arXiv 2606.03075), of which a summary was at
hand, and its released code (Danielement321/TGV-KV). One shot, after the prompt. Text-vision budgeting (TVB) divides the
total between layers by the attention that text pays to vision; text-weighted ranking (TWR) weighs that attention by how
much later text attends to each text token; text-prioritised retention (TPR) keeps all text before any visual entry.

What is a reconstruction, and the readings taken:
  - heads are averaged, and all heads of a layer share a set (both as in the released code);
  - attention between text and vision is that of the full row (the released code), not a softmax over vision alone;
  - text is every entry that is not visual, also what stands before or between images; weights are normalised over it;
  - a layer's budget counts text and visual entries under scope ``all``, the paper's; otherwise text stays beside it;
  - what a layer cannot take goes to the others, and every layer keeps at least one entry.

Setting ``released`` imitates the released code: weights and their normalisation only from text after the images; all
between the first and the last visual entry is one block; text scores are raised by 100 instead of ranked first; the
first four entries and the last always stay; a layer's removals are rounded on their own, so that a sample may keep a
few entries more or fewer than its total, and what a layer cannot take is lost. That code also drops an entry at each
decoding step, which is not offered: an eviction acts once.

Legend: B batch, N cached rows of the prompt, H query heads, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from subtoken_train.evictions.base import Candidates, Eviction, LayerScores
from subtoken_train.evictions.budgets import competing_counts, divide_budget
from subtoken_train.evictions.layer_views import LayerView, Need
from subtoken_train.evictions.observers import column_sums, task_rows
from subtoken_train.types import Region

TEXT_BONUS = 100.0  # of the released code
FIRST, LAST = 4, 1  # entries that the released code always keeps


@dataclass(frozen=True)
class TGVKV(Eviction):
    """TGV-KV.

    Attributes:
        released: imitate the released code where it differs from the paper (see the top of the file).
    """

    name: ClassVar[str] = "tgv_kv"
    needs: ClassVar[frozenset[Need]] = frozenset({"blocks"})
    needs_image: ClassVar[bool] = True

    released: bool = False

    def score(self, view: LayerView) -> LayerScores:
        """One order for all heads, [B, 1, N]; the weight is the attention from text to vision.

        The paper's scores are the negative rank by TPR, so that text comes first whatever it scores; ``notes`` has the
        scores themselves (``text``, ``visual``), 0 elsewhere.
        """
        before_BN, block_BN = image_parts(view.regions_BN)
        visual_BN = block_BN if self.released else view.regions_BN == Region.VISUAL
        text_BN = view.entries_BN & ~visual_BN
        rows_BN = task_rows(view.regions_BN) if self.released else text_BN
        received_BN = column_sums(view.blocks(rows_BN)).mean(1)
        weight_BN = text_weights(received_BN, rows_BN)
        if not self.released:
            weight_BN = weight_BN / weight_BN.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        visual_score_BN = column_sums(view.blocks(rows_BN), weight_BN).mean(1).masked_fill(~visual_BN, 0.0)
        vision_B = received_BN.masked_fill(~visual_BN, 0.0).sum(-1)
        if not self.released:
            text_score_BN = received_BN.masked_fill(~text_BN, 0.0)
            order_BN = text_first(text_score_BN, visual_score_BN, text_BN, visual_BN)
            notes = {"text": text_score_BN, "visual": visual_score_BN}
            return LayerScores(order_BN[:, None], torch.zeros_like(text_BN), vision_B, notes)
        everything_BN = column_sums(view.blocks(view.entries_BN)).mean(1)
        text_score_BN = torch.where(before_BN, everything_BN, received_BN) + TEXT_BONUS
        scores_BN = torch.where(text_BN, text_score_BN, visual_score_BN)
        return LayerScores(scores_BN[:, None], ends(view.entries_BN), vision_B)

    @property
    def across_layers(self) -> bool:
        """See ``Eviction.across_layers``: layers share the budget."""
        return True

    def counts(self, scores: list[LayerScores], candidates: Candidates) -> Tensor:
        """Entries per layer, int64 [L, B] (TVB)."""
        vision_LB = torch.stack([each.weight_B for each in scores if each.weight_B is not None])
        most_LB = competing_counts(candidates)
        total_B = candidates.budget_LB.sum(0)
        if self.released:
            return torch.minimum(released_counts(vision_LB, total_B, most_LB).clamp(min=1), most_LB)
        return divide_budget(vision_LB, total_B, torch.ones_like(most_LB), most_LB)


def image_parts(regions_BN: Tensor) -> tuple[Tensor, Tensor]:
    """Entries before the first visual entry, and those from there to the last, each bool [B, N]."""
    entries_BN, visual_BN = regions_BN != Region.PADDING, regions_BN == Region.VISUAL
    started_BN = visual_BN.cumsum(-1) > 0
    going_on_BN = visual_BN.flip(-1).cumsum(-1).flip(-1) > 0
    return entries_BN & ~started_BN & going_on_BN, entries_BN & started_BN & going_on_BN


def text_weights(received_BN: Tensor, rows_BN: Tensor) -> Tensor:
    """Mean attention that each text token gets from itself and the text after it (TWR), [B, N]; 0 elsewhere.

    Args:
        received_BN: what it receives from all rows, mean over heads.
        rows_BN: the text whose rows were summed, bool.
    """
    later_BN = rows_BN.flip(-1).cumsum(-1).flip(-1)  # N_t - j + 1 for the j-th text token
    return (received_BN / later_BN.clamp(min=1)).masked_fill(~rows_BN, 0.0)


def text_first(text_score_BN: Tensor, visual_score_BN: Tensor, text_BN: Tensor, visual_BN: Tensor) -> Tensor:
    """The negative rank of each entry, [B, N]: text by its score, then vision by its (TPR); ties to the lower index."""
    scores_BN = torch.where(text_BN, text_score_BN, visual_score_BN)
    order_BN = scores_BN.sort(dim=-1, descending=True, stable=True).indices
    class_BN = (2 * text_BN.int() + visual_BN.int()).gather(-1, order_BN)  # padding last
    order_BN = order_BN.gather(-1, class_BN.sort(dim=-1, descending=True, stable=True).indices)
    return -order_BN.argsort(dim=-1).float()


def ends(entries_BN: Tensor) -> Tensor:
    """The first four entries and the last, bool [B, N]."""
    number_BN = entries_BN.cumsum(-1)
    count_B1 = entries_BN.sum(-1, keepdim=True)
    return entries_BN & ((number_BN <= FIRST) | (number_BN > count_B1 - LAST))


def released_counts(vision_LB: Tensor, total_B: Tensor, length_LB: Tensor) -> Tensor:
    """Entries per layer as the released code counts them, int64 [L, B]: its share of the total, removals rounded.

    Args:
        vision_LB: attention from text to vision; all 0 in a sample counts as all equal.
        total_B: entries to spend over all layers.
        length_LB: entries of each layer.
    """
    vision_LB = vision_LB.cpu().double()
    vision_LB = torch.where(vision_LB.sum(0) > 0, vision_LB, 1.0)
    kept_LB = vision_LB / vision_LB.sum(0) * total_B.cpu()
    removed_LB = (length_LB.cpu() - kept_LB).round().clamp(min=0).long()
    return length_LB - removed_LB.to(length_LB.device)
