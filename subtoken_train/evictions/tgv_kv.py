"""TGV-KV: text says which visual entries matter and which layers need them; text itself is evicted last.

Source: "TGV-KV: Text-Grounded KV Eviction for Vision-Language Models" (arXiv 2606.03075), of which a summary was at
hand, and its code (Danielement321/TGV-KV). Text-vision budgeting (TVB) divides the total between layers by the
attention that text pays to vision; text-weighted ranking (TWR) weighs that attention by how much later text attends to
each text token; text-prioritised retention (TPR) keeps all text before any visual entry. A reconstruction: heads are
averaged and share a set, attention between text and vision is that of the full row (both as released); text is every
entry that is not visual; a layer's budget counts text under scope ``all`` (the paper's), otherwise text stays beside
it.

Setting ``released`` imitates the code: weights only from text after the images; all between the first and the last
visual entry is one block; text scores are raised by 100; the first four entries and the last stay; removals are rounded
layer by layer, so that a total may be missed by a few entries. It also drops an entry at each decoding step; here
nothing is evicted while decoding. ``budgets``, ``importance`` and ``first`` are the paper's ablation.

Legend: B batch, N cached rows of the prompt, H query heads, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from subtoken_train.evictions.base import Eviction
from subtoken_train.evictions.budgets import competing_counts, divide_budget
from subtoken_train.evictions.observers import column_sums, task_rows
from subtoken_train.functional.gather import last_marked
from subtoken_train.types import Region
from subtoken_train.view.method import by_settings, setting
from subtoken_train.view.scores import Candidates, Scores
from subtoken_train.view.view import Need, View

Budgets = Literal["TV", "VV", "TT", "uniform"]
Importance = Literal["TV+TT", "VV+TT", "window", "self"]
First = Literal["text", "vision", "score"]
TEXT_BONUS, FIRST, LAST = 100.0, 4, 1  # of the released code: for text, and entries that it always keeps


@dataclass(frozen=True)
class TGVKV(Eviction):
    """TGV-KV.

    Attributes:
        released: imitate the released code where it differs from the paper (see the top of the file).
        budgets: what a layer's share of the total is measured by: the attention that text pays to vision (``TV``),
            vision to vision (``VV``) or text to text (``TT``); or ``uniform``, each layer its own budget.
        importance: ``TV+TT``: vision by the text that looks at it, weighted (TWR), and text by text. ``VV+TT``: each by
            the attention of its own kind. ``window``: all by the last ``window_size`` rows. ``self``: all by all rows.
        window_size: rows of a ``window``.
        first: ``text`` before any visual entry (TPR), ``vision`` before any text, or both by ``score`` alone.
    """

    name: ClassVar[str] = "tgv_kv"
    needs: ClassVar[frozenset[Need]] = frozenset({"blocks"})
    heads_share: ClassVar[bool] = True
    needs_image: ClassVar[bool] = True

    released: bool = False
    budgets: Budgets = "TV"
    importance: Importance = "TV+TT"
    window_size: int = setting(32, 1)
    first: First = "text"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.released and (self.budgets, self.importance, self.first) != ("TV", "TV+TT", "text"):
            raise ValueError("tgv_kv released=true imitates one code; leave budgets, importance and first out, or it")

    def score(self, view: View) -> Scores:
        """One order for all heads, [B, 1, N]: negative ranks; ``notes`` has the scores of ``text`` and ``visual``."""
        if self.released:
            return released_scores(view)
        visual_BN = view.regions_BN == Region.VISUAL
        text_BN = view.entries_BN & ~visual_BN
        from_text_BN, from_vision_BN = received(view, text_BN), None
        if "VV" in (self.budgets, self.importance[:2]):
            from_vision_BN = received(view, visual_BN)
        measured = {"TV": (from_text_BN, visual_BN), "VV": (from_vision_BN, visual_BN), "TT": (from_text_BN, text_BN)}
        summed_BN, columns_BN = measured.get(self.budgets, (view.entries_BN.float(), view.entries_BN))
        assert summed_BN is not None
        if self.importance == "TV+TT":
            weight_BN = text_weights(from_text_BN, text_BN)
            weight_BN = weight_BN / weight_BN.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
            text_score_BN, visual_score_BN = from_text_BN, received(view, text_BN, weight_BN)
        elif self.importance == "VV+TT":
            assert from_vision_BN is not None
            text_score_BN, visual_score_BN = from_text_BN, from_vision_BN
        else:
            window_BN = last_marked(view.entries_BN, self.window_size)
            text_score_BN = visual_score_BN = received(
                view, window_BN if self.importance == "window" else view.entries_BN
            )
        notes = {
            "text": text_score_BN.masked_fill(~text_BN, 0.0),
            "visual": visual_score_BN.masked_fill(~visual_BN, 0.0),
        }
        order_BN = retention_order(notes["text"], notes["visual"], text_BN, visual_BN, self.first)
        layer_B = summed_BN.masked_fill(~columns_BN, 0.0).sum(-1)
        return Scores(order_BN[:, None], torch.zeros_like(text_BN), layer_B, notes)

    across_layers = by_settings(lambda self: self.budgets != "uniform")

    def counts(self, scores: list[Scores], candidates: Candidates) -> Tensor:
        if self.budgets == "uniform":
            return candidates.budget_LB
        weight_LB = torch.stack([each.weight_B for each in scores if each.weight_B is not None])
        most_LB = competing_counts(candidates)
        total_B = candidates.budget_LB.sum(0)
        if self.released:
            return torch.minimum(released_counts(weight_LB, total_B, most_LB).clamp(min=1), most_LB)
        return divide_budget(weight_LB, total_B, torch.ones_like(most_LB), most_LB)


def received(view: View, rows_BN: Tensor, weight_BN: Tensor | None = None) -> Tensor:
    """Attention that each entry gets from ``rows_BN``, mean over heads, [B, N]; 0 where there are no such rows."""
    if not bool(rows_BN.any()):
        return torch.zeros(rows_BN.shape, device=rows_BN.device)
    return column_sums(view.blocks(rows_BN), weight_BN).mean(1)


def released_scores(view: View) -> Scores:
    """As the released code scores: see the top of the file."""
    before_BN, visual_BN = image_parts(view.regions_BN)
    rows_BN = task_rows(view.regions_BN)
    from_text_BN = received(view, rows_BN)
    visual_score_BN = received(view, rows_BN, text_weights(from_text_BN, rows_BN))
    text_score_BN = torch.where(before_BN, received(view, view.entries_BN), from_text_BN) + TEXT_BONUS
    scores_BN = torch.where(view.entries_BN & ~visual_BN, text_score_BN, visual_score_BN.masked_fill(~visual_BN, 0.0))
    vision_B = from_text_BN.masked_fill(~visual_BN, 0.0).sum(-1)
    first_BN = view.entries_BN & (view.entries_BN.cumsum(-1) <= FIRST)
    return Scores(scores_BN[:, None], first_BN | last_marked(view.entries_BN, LAST), vision_B)


def image_parts(regions_BN: Tensor) -> tuple[Tensor, Tensor]:
    """Entries before the first visual entry, and those from there to the last, each bool [B, N]."""
    entries_BN, visual_BN = regions_BN != Region.PADDING, regions_BN == Region.VISUAL
    started_BN = visual_BN.cumsum(-1) > 0
    going_on_BN = visual_BN.flip(-1).cumsum(-1).flip(-1) > 0
    return entries_BN & ~started_BN & going_on_BN, entries_BN & started_BN & going_on_BN


def text_weights(received_BN: Tensor, rows_BN: Tensor) -> Tensor:
    """Mean attention that each text token gets from itself and the text after it (TWR), [B, N]; 0 elsewhere."""
    later_BN = rows_BN.flip(-1).cumsum(-1).flip(-1)  # N_t - j + 1 for the j-th text token
    return (received_BN / later_BN.clamp(min=1)).masked_fill(~rows_BN, 0.0)


def retention_order(
    text_score_BN: Tensor, visual_score_BN: Tensor, text_BN: Tensor, visual_BN: Tensor, first: First = "text"
) -> Tensor:
    """The negative rank of each entry, [B, N]: one kind by score, then the other (TPR); ties to the lower index."""
    scores_BN = torch.where(text_BN, text_score_BN, visual_score_BN)
    order_BN = scores_BN.sort(dim=-1, descending=True, stable=True).indices
    text, vision = {"text": (2, 1), "vision": (1, 2), "score": (1, 1)}[first]
    class_BN = (text * text_BN.int() + vision * visual_BN.int()).gather(-1, order_BN)  # padding last
    order_BN = order_BN.gather(-1, class_BN.sort(dim=-1, descending=True, stable=True).indices)
    return -order_BN.argsort(dim=-1).float()


def released_counts(vision_LB: Tensor, total_B: Tensor, length_LB: Tensor) -> Tensor:
    """Entries per layer as released, int64 [L, B]: shares by attention (equal where all is 0), removals rounded."""
    vision_LB = vision_LB.cpu().double()
    vision_LB = torch.where(vision_LB.sum(0) > 0, vision_LB, 1.0)
    kept_LB = vision_LB / vision_LB.sum(0) * total_B.cpu()
    removed_LB = (length_LB.cpu() - kept_LB).round().clamp(min=0).long()
    return length_LB - removed_LB.to(length_LB.device)
