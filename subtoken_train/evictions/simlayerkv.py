"""SimLayerKV (Zhang et al., 2024): lazy layers keep the first entries and the recent ones, all others every entry.

Source: "SimLayerKV: A Simple Framework for Layer-Level KV Cache Reduction" (2410.13846), its release
(sail-sg/SimLayerKV) and NVIDIA's kvpress 0.5.4. A layer is lazy if the last rows, mean over rows and query heads, pay
more than a threshold of their attention to the first and the recent entries. The score of a layer's entries is what it
pays elsewhere, so the released rule of 0.9 (kvpress: 0.9 for Llama 3, 0.85 for Qwen, 0.8 for Mistral, 0.65 for Llama 2)
is ``eviction_keep: {threshold: 0.1, window: 0}``.
With a budget (ours) the layers that pay most elsewhere are whole, as far as it goes beside the others' first and recent
entries; the one that it does not fill keeps more recent entries. A budget below all first and recent entries is divided
alike. ``recent`` as a share of the budget always leaves a choice.

What differs from the releases: recent entries are the last in scope; attention to what stays anyway counts as the first
entries' does; the prompt's last rows look, not the first decoded one; kvpress leaves out a row's own entry and keeps
one recent entry fewer. What it does not do: nothing is evicted while decoding.

Legend: B batch, N cached rows of the prompt, H query heads, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from subtoken_train.evictions.base import Eviction
from subtoken_train.evictions.budgets import competing_counts
from subtoken_train.evictions.duo_attention import head_counts
from subtoken_train.evictions.observers import window_length, window_setting
from subtoken_train.functional.gather import last_marked
from subtoken_train.view.method import setting
from subtoken_train.view.scores import Candidates, Scale, Scores
from subtoken_train.view.view import Need, View

SINKS = "sinks"


@dataclass(frozen=True)
class SimLayerKV(Eviction):
    """Whole caches for the layers that are not lazy.

    Attributes:
        sinks: first entries of the prompt that a lazy layer keeps.
        recent: last entries in scope that it keeps: a whole number, or, between 0 and 1, their share of the layer's
            budget, rounded down, 1 at least.
        rows: last rows of the prompt whose attention says which layers are lazy; the paper's prefill variant takes 32.
    """

    name: ClassVar[str] = "simlayerkv"
    across_layers: ClassVar[bool] = True
    needs: ClassVar[frozenset[Need]] = frozenset({"rows"})
    heads_share: ClassVar[bool] = True

    sinks: int = setting(4)
    recent: int | float = window_setting(1024)
    rows: int = setting(1, 1)

    @property
    def observing_rows(self) -> int:
        return self.rows

    @property
    def absolute(self) -> Scale | None:
        return Scale(low=0.0, high=1.0) if isinstance(self.recent, int) else None

    def score(self, view: View) -> Scores:
        """Return what the layer pays to what a lazy one lets go, [B, 1, N]; entries that it keeps are protected."""
        sinks_BN = view.entries_BN & (view.entries_BN.cumsum(-1) <= self.sinks)
        recent_BN = last_marked(view.entries_BN & view.in_scope_BN, window_length(view, self.recent))
        held_BN = sinks_BN | recent_BN
        index_BW = view.last_rows(self.rows)
        elsewhere_B = attention_to(view.rows(index_BW), index_BW, view.entries_BN & view.in_scope_BN & ~held_BN)
        scores_B1N = elsewhere_B[:, None, None].expand(-1, 1, held_BN.shape[1])
        return Scores(scores_B1N, held_BN, weight_B=elsewhere_B, notes={SINKS: sinks_BN})

    def counts(self, scores: list[Scores], candidates: Candidates) -> Tensor:
        elsewhere_LB = torch.stack([each.weight_B for each in scores if each.weight_B is not None])
        held = [each.protected_BN & own for each, own in zip(scores, candidates.competes_LBN, strict=True)]
        most_LB = competing_counts(candidates)
        least_LB = torch.minimum(torch.stack([each.sum(-1) for each in held]).clamp(min=1), most_LB)
        return head_counts(elsewhere_LB[..., None], least_LB, most_LB, candidates.budget_LB.sum(0))[..., 0]

    def at_budget(self, scores: Scores, competes_BN: Tensor, count_Bh: Tensor) -> Scores:
        """Later entries score higher, and the sinks alone are protected."""
        places_N = torch.arange(competes_BN.shape[1], device=competes_BN.device).float()
        return replace(scores, scores_BhN=places_N.expand_as(scores.scores_BhN), protected_BN=scores.notes[SINKS])


def attention_to(probability_BHWN: Tensor, index_BW: Tensor, marked_BN: Tensor) -> Tensor:
    """Share of their attention that rows pay to marked entries, [B] in fp32, in [0, 1]: mean over heads and rows.

    Args:
        index_BW: the rows; -1 is none.
    """
    rows_B = (index_BW >= 0).sum(-1).clamp(min=1)
    return ((probability_BHWN.mean(1) * marked_BN[:, None]).sum((1, 2)) / rows_B).clamp(max=1)
