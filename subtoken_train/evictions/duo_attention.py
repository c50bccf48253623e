"""DuoAttention and SimLayerKV: some heads, or layers, keep everything, the others first and recent entries.

Legend: B batch, N cached rows of the prompt, H query heads, h key-value heads, L layers.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from subtoken_train.calibrations import CalibratedNumbers, NumberTable, check_table
from subtoken_train.errors import MAX_TOKENS, check_range
from subtoken_train.evictions.base import Eviction
from subtoken_train.evictions.budgets import claims, competing_counts, divide_budget, protected_counts
from subtoken_train.evictions.observers import over_groups, window_length, window_setting
from subtoken_train.functional.gather import last_marked
from subtoken_train.view.method import by_settings, setting
from subtoken_train.view.scores import Candidates, Scale, Scores
from subtoken_train.view.view import Need, View

SINKS, RECENT = 128, 256  # entries of a streaming head in the published training


@dataclass(frozen=True)
class HeadAlphas(NumberTable):
    """Need of every head for its whole cache, [L, h] in [0, 1]; first and recent entries of training's streaming."""

    table: ClassVar[str] = "alpha"
    says: ClassVar[str] = "alpha of every head, a line per layer"

    alpha: list[list[float]]
    sinks: int
    recent: int

    def __post_init__(self) -> None:
        check_table("alpha", self.alpha, 0, 1)
        check_range("sinks", self.sinks, 0, MAX_TOKENS)
        check_range("recent", self.recent, 1, MAX_TOKENS)


@dataclass(frozen=True)
class DuoAttention(Eviction):
    """DuoAttention (Xiao et al., 2024): retrieval heads keep every entry, others first and recent ones.

    Source: arXiv 2410.10819 and its code. A number alpha in [0, 1] says how much a key-value head needs its whole
    cache; it is learned offline on recall (``subtoken-train calibrate duo_attention``). Without a file alpha is the
    share of its attention that a head pays to what streaming would not hold, which the paper finds worse. All heads
    first get what streaming takes; the rest of the budget goes to the heads by falling alpha, each up to its whole
    cache. A budget below what streaming takes in all heads is divided alike.

    Attributes:
        calibration: file of the heads' alphas; None: read off every prompt.
        sinks: first entries of the prompt that a streaming head keeps; None: as the calibration was made, else 128.
        recent: last competing entries that it keeps; None: likewise, else 256.
    """

    name: ClassVar[str] = "duo_attention"
    across_layers: ClassVar[bool] = True
    calibrates: ClassVar[type[CalibratedNumbers]] = HeadAlphas
    needs: ClassVar[frozenset[Need]] = frozenset({"blocks"})
    heads_differ: ClassVar[bool] = True

    calibration: str | None = None
    sinks: int | None = setting(None)
    recent: int | None = setting(None, 1)

    @property
    def streaming(self) -> tuple[int, int]:
        """(sinks, recent entries) of a streaming head."""
        made = self.calibrated
        sinks, recent = (SINKS, RECENT) if made is None else (made.numbers.sinks, made.numbers.recent)
        return sinks if self.sinks is None else self.sinks, recent if self.recent is None else self.recent

    def score(self, view: View) -> Scores:
        sinks, recent = self.streaming
        place_BN, heads = view.entries_BN.cumsum(-1), view.key_BhNd.shape[1]
        if self.calibrated is None:
            alpha_Bh = attention_outside(view, sinks, recent)
        else:
            alpha_Bh = self.numbers_of(view.layer, place_BN.device, "alpha").expand(len(place_BN), heads)
        scores_BhN = place_BN[:, None].float().expand(-1, heads, -1)
        return Scores(scores_BhN, view.entries_BN & (place_BN <= sinks), notes={"alpha": alpha_Bh})

    def counts(self, scores: list[Scores], candidates: Candidates) -> Tensor:
        alpha_LBh = torch.stack([layer.notes["alpha"] for layer in scores])
        most_LB, heads = competing_counts(candidates), alpha_LBh.shape[-1]
        least_LB = torch.minimum(protected_counts(scores, candidates) + self.streaming[1], most_LB)
        return head_counts(alpha_LBh, least_LB, most_LB, candidates.budget_LB.sum(0) * heads)


def attention_outside(view: View, sinks: int, recent: int) -> Tensor:
    """Average over all rows a head's attention on what streaming would not hold, [B, h], in [0, 1]."""
    entries_BN, kv_heads = view.entries_BN, view.key_BhNd.shape[1]
    place_BN = entries_BN.cumsum(-1)
    outside_BH = torch.zeros(view.query_BHNd.shape[:2], device=entries_BN.device)
    for index_BW, probability_BHWN in view.blocks(entries_BN):
        row_BW1 = place_BN.gather(1, index_BW.clamp(min=0))[..., None]
        outside_BWN = (place_BN[:, None] > sinks) & (row_BW1 - place_BN[:, None] >= recent)
        outside_BH += (probability_BHWN * outside_BWN[:, None]).sum((2, 3))
    share_BH1 = (outside_BH / entries_BN.sum(-1, keepdim=True).clamp(min=1)).clamp(max=1)[..., None]
    return over_groups(share_BH1, kv_heads)[..., 0]


def head_counts(alpha_LBh: Tensor, least_LB: Tensor, most_LB: Tensor, total_B: Tensor) -> Tensor:
    """Divide the total among the heads, int64 [L, B, h]: highest alpha first, ties to the lower layer, then head."""
    layers, batch, heads = alpha_LBh.shape
    least_TB, most_TB = (each.repeat_interleave(heads, 0) for each in (least_LB, most_LB))
    order_TB = alpha_LBh.transpose(1, 2).flatten(0, 1).sort(dim=0, descending=True, stable=True).indices
    room_TB = (most_TB - least_TB).gather(0, order_TB)
    before_TB = room_TB.cumsum(0) - room_TB
    granted_TB = torch.minimum(room_TB, ((total_B - least_TB.sum(0)).clamp(min=0) - before_TB).clamp(min=0))
    count_TB = least_TB.scatter_add(0, order_TB, granted_TB)
    # less than streaming takes everywhere: in proportion
    fewer_TB = divide_budget(least_TB, total_B, most_TB.clamp(max=1), least_TB)
    count_TB = torch.where(total_B < least_TB.sum(0), fewer_TB, count_TB)
    return count_TB.view(layers, heads, batch).transpose(1, 2)


@dataclass(frozen=True)
class SimLayerKV(Eviction):
    """SimLayerKV (Zhang et al., 2024): lazy layers keep the first and recent entries, others keep all.

    Source: arXiv 2410.13846, its code and kvpress 0.5.4. A layer is lazy if the last rows, mean over rows and query
    heads, pay more than a threshold of their attention to the first and the recent entries. The score of a layer's
    entries is what it pays elsewhere, so the released rule of 0.9 (kvpress: 0.9 for Llama 3, 0.85 for Qwen, 0.8 for
    Mistral, 0.65 for Llama 2) is ``eviction_keep: {threshold: 0.1, window: 0}``. With a budget (ours) the layers that
    pay most elsewhere are whole, as far as it goes beside the others' first and recent entries; a budget below these is
    divided alike. The prompt's last rows look, not the first decoded one; attention to all that stays counts alike.

    Attributes:
        sinks: first entries of the prompt that a lazy layer keeps.
        recent: last entries in scope that it keeps: a whole number, or a share of the layer's budget.
        rows: last rows of the prompt whose attention says which layers are lazy; the paper's prefill variant takes 32.
    """

    name: ClassVar[str] = "simlayerkv"
    across_layers: ClassVar[bool] = True
    needs: ClassVar[frozenset[Need]] = frozenset({"rows"})
    heads_share: ClassVar[bool] = True

    sinks: int = setting(4)
    recent: int | float = window_setting(1024)
    rows: int = setting(1, 1)

    observing_rows = by_settings(lambda self: self.rows)
    absolute = by_settings(lambda self: Scale(low=0.0, high=1.0) if isinstance(self.recent, int) else None)

    def score(self, view: View) -> Scores:
        sinks_BN = view.entries_BN & (view.entries_BN.cumsum(-1) <= self.sinks)
        held_BN = sinks_BN | last_marked(view.entries_BN & view.in_scope_BN, window_length(view, self.recent))
        index_BW = view.last_rows(self.rows)
        let_go_BN = view.entries_BN & view.in_scope_BN & ~held_BN
        paid_B = (view.rows(index_BW).mean(1) * let_go_BN[:, None]).sum((1, 2))
        elsewhere_B = (paid_B / (index_BW >= 0).sum(-1).clamp(min=1)).clamp(max=1)
        scores_B1N = elsewhere_B[:, None, None].expand(-1, 1, held_BN.shape[1])
        return Scores(scores_B1N, held_BN, weight_B=elsewhere_B, notes={"sinks": sinks_BN})

    def counts(self, scores: list[Scores], candidates: Candidates) -> Tensor:
        held = [each.protected_BN & own for each, own in zip(scores, candidates.competes_LBN, strict=True)]
        most_LB = competing_counts(candidates)
        least_LB = torch.minimum(torch.stack([each.sum(-1) for each in held]).clamp(min=1), most_LB)
        return head_counts(claims(scores)[..., None], least_LB, most_LB, candidates.budget_LB.sum(0))[..., 0]

    def at_budget(self, scores: Scores, competes_BN: Tensor, count_Bh: Tensor) -> Scores:
        places_N = torch.arange(competes_BN.shape[1], device=competes_BN.device).float()
        return replace(scores, scores_BhN=places_N.expand_as(scores.scores_BhN), protected_BN=scores.notes["sinks"])
