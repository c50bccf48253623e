"""H2O, and what chooses by its sums: the multimodal LOOK-M and MEDA, Elastic Cache and PrefixKV.

Legend: B batch, N cached rows of the prompt, H query heads, h key-value heads, L layers, R tabulated budgets.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from subtoken_train.calibrations import CalibratedNumbers, NumberTable, check_table
from subtoken_train.evictions.base import Eviction, layer_count, protect_last
from subtoken_train.evictions.budgets import claims, competing_counts, divide_budget, divided, protected_counts
from subtoken_train.evictions.observers import GroupReduction, over_groups, share_of, window_setting
from subtoken_train.functional.causal_attention import attention_blocks
from subtoken_train.functional.gather import last_marked
from subtoken_train.functional.merging import Merge
from subtoken_train.types import Region
from subtoken_train.view.method import setting
from subtoken_train.view.scores import Candidates, Scores
from subtoken_train.view.view import Need, Online, View


@dataclass(frozen=True)
class H2O(Eviction):
    """H2O (Zhang et al., 2023): the entries that gathered most attention, and the recent ones.

    Source: Algorithm 1 of "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models", once,
    after the prompt: an entry's score is the sum of its column of the causal attention matrix, which is computed a
    second time for it, a block of rows at a time. The paper gives recent entries half of the budget; its code and
    KVCache-Factory a fixed number (``window``). Where only the context competes the prompt's last entries stay anyway
    and cost no budget. While tokens are decoded (``eviction_every``) sums go on.

    Attributes:
        recent_share: as many of the prompt's last entries as this share of the budget always stay, rounded down.
        window: if not 0, that many of the prompt's last entries stay instead, or as many as the budget has; between 0
            and 1 a share of the budget, as ``recent_share`` is.
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
        sums, kv_heads = view.received(entries_BN), view.key_BhNd.shape[1]
        if self.group == "mean":  # a sum for each key-value head is enough to go on with
            sums = over_groups(sums, kv_heads)
        if view.carried is not None:
            sums = sums + view.carried
        scores = sums / view.viewers().clamp(min=1)[:, None] if self.normalise else sums
        scores_BhN = over_groups(scores, kv_heads, self.group)
        notes = {"entries": entries_BN, "in_scope": view.in_scope_BN & entries_BN}
        return Scores(scores_BhN, torch.zeros_like(entries_BN), notes=notes, carried=sums)

    def at_budget(self, scores: Scores, competes_BN: Tensor, count_Bh: Tensor) -> Scores:
        count_B = layer_count(count_Bh) + (scores.notes["in_scope"] & ~competes_BN).sum(-1)
        if isinstance(self.window, int) and self.window:
            recent_B = torch.full_like(count_B, self.window)
        else:
            recent_B = share_of(count_B, self.window or self.recent_share)
        return protect_last(scores, scores.notes["entries"], recent_B)


@dataclass(frozen=True)
class LookM(H2O):
    """LOOK-M (Wan et al., 2024): text stays before any visual entry, and what goes is merged into what stays.

    Source: arXiv 2406.18139 and its code (SUSTechBruce/LOOK-M @ecf0f51). H2O's scores and recent share; to text's the
    largest visual score of the head is added (twice, so that rounding changes nothing). What a head drops joins the
    kept entry whose key is most like its own (merge ``pivot``, the default). Without an image: H2O with merging.

    The budget is exact, where the release keeps all text whatever the budget. Its averaging and weighting pair entries
    with other entries' keys; neither is offered. While decoding, generated entries are text, and nothing is merged.
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
    """MEDA (Wan et al., 2025): layers with wide attention between text and image keep more, by LOOK-M's choice.

    Source: arXiv 2502.17599 and its code (AIoT-MLSys-Lab/MEDA @0e1a53b). A layer's cross-modal entropy is that of
    text's attention to the visual entries plus that of visual rows' attention to text, mean over rows and heads; its
    softmax over the layers divides the budget. Entries are chosen by LOOK-M, and merged by a mean (``average``).

    A reconstruction from the abstract and a function of the release that nothing calls: each softmax runs over the
    other kind alone. The release runs the entropy of the whole causal attention. Prompts without an image are refused.
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
        return divided(claims(scores).softmax(0) * candidates.budget_LB, candidates, LEAST)


def entropy_of(view: View, rows_BN: Tensor, keys_BN: Tensor) -> Tensor:
    """Return the entropy of marked rows' attention over the marked keys, later ones too, row and head mean, [B]."""
    total_B = torch.zeros(len(rows_BN), device=rows_BN.device)
    everywhere = rows_BN.shape[1]  # as if all keys lay before the first row
    for _, paid_BHWN in attention_blocks(view.query_BHNd, view.key_BhNd, rows_BN, keys_BN, view.scale, everywhere):
        total_B += torch.special.entr(paid_BHWN).sum((2, 3)).mean(1)
    return total_B / rows_BN.sum(-1).clamp(min=1)


@dataclass(frozen=True)
class Elastic(Eviction):
    """Elastic Cache (Liu et al., 2024): entries that gathered most attention stay, and take in those that go.

    Source: "Efficient Inference of Vision Instruction-Following Models with Elastic Cache" and its code: the attention
    that an entry receives, summed over all rows, mean over all query heads, one set for a layer. A dropped entry is
    merged into the nearest that stays (the merge ``position``) unless another merge is asked for. The released code
    takes ``argsort`` for a rank and so keeps entries by chance; here the best scores stay, as the paper says.

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
        sums_BHN = view.received(entries_BN)
        ends_BN = entries_BN & (entries_BN.cumsum(-1) <= self.sinks) | last_marked(entries_BN, self.recent)
        return Scores(sums_BHN.mean(1, keepdim=True), ends_BN)


@dataclass(frozen=True)
class LayerShares(NumberTable):
    """Shares of their entries that layers keep, [R, L], under budgets ``keep`` [R], which rise between 0 and 1."""

    table: ClassVar[str] = "shares"
    says: ClassVar[str] = "share of every layer, a line per budget"
    by_layer: ClassVar[bool] = True

    keep: list[float]
    shares: list[list[float]]

    def __post_init__(self) -> None:
        check_table("shares", self.shares, 0, 1)
        if len(self.keep) != len(self.shares):
            raise ValueError(f"keep has {len(self.keep)} budgets and shares {len(self.shares)} rows; a row for each")
        if any(not low < high for low, high in pairwise([0.0, *self.keep, 1.0])):
            raise ValueError("keep must rise, above 0 and below 1")

    def at(self, keep_B: Tensor) -> Tensor:
        """Return the shares at the samples' own budgets, float64 [L, B]; linear between tabulated budgets, 0 and 1."""
        layers = len(self.shares[0])
        keep_R = torch.tensor([0.0, *self.keep, 1.0], dtype=torch.float64)
        share_RL = torch.tensor([[0.0] * layers, *self.shares, [1.0] * layers], dtype=torch.float64)
        keep_B = keep_B.double().cpu()
        above_B = torch.searchsorted(keep_R, keep_B).clamp(1, len(keep_R) - 1)
        low_B, high_B = keep_R[above_B - 1], keep_R[above_B]
        return torch.lerp(share_RL[above_B - 1], share_RL[above_B], ((keep_B - low_B) / (high_B - low_B))[:, None]).T


@dataclass(frozen=True)
class PrefixKV(Elastic):
    """PrefixKV (Wang et al., 2024): Elastic Cache's scores; layers keep as many entries as the same attention needs.

    Source: "PrefixKV: Adaptive Prefix KV Cache is What Vision Instruction-Following Models Need for Efficient
    Generation" and its code. What a layer's best entries hold together of its attention is a rising curve; one level
    for all layers says how far each prefix reaches, so that all together are the budget. The release bisects for the
    level; here all curves' values are sorted once, which gives it exactly. Nothing is merged unless it is asked for.

    Attributes:
        calibration: file of shares found offline, as in the paper (``subtoken-train calibrate prefixkv``), which then
            hold for every prompt; None: every prompt's own prefixes.
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
    """Return the share of competing attention that the best entries hold, [B, N], rising to 1, then ``inf``."""
    held_BN = scores_BN.masked_fill(~competes_BN, 0.0).sort(dim=-1, descending=True).values.cumsum(-1)
    held_BN = held_BN / held_BN[:, -1:].clamp(min=torch.finfo(torch.float32).tiny)
    within_BN = torch.arange(held_BN.shape[-1], device=held_BN.device) < competes_BN.sum(-1, keepdim=True)
    return held_BN.masked_fill(~within_BN, torch.inf)


def prefix_counts(curves: list[Tensor], total_B: Tensor, protected_LB: Tensor, most_LB: Tensor) -> Tensor:
    """Divide the total so that each layer keeps the same share of its attention; entries, int64 [L, B].

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
