"""CAKE (Qin et al., 2025): layers whose last rows look widely and change their minds keep more entries than others.

Source: "CAKE: Cascading and Adaptive KV Cache Eviction with Layer Preferences" (2503.12491) and its code
(antgroup/cakekv @c4675ce). The last ``window`` rows, which always stay, look at the entries before them. A layer's
preference is the entropy of their attention to the power 1 / ``tau1``, times its variance from row to row to the power
1 / ``tau2``, both summed over heads; what the windows leave of the budget is divided by it. An entry's score is its
mean attention plus ``gamma`` times the variance, averaged over its neighbours, then over a group's query heads.

Remainders go by preference, where the release hands them out alike; short prompts are compressed too; samples are not
added up; no layer is cut before all have run, where its cascade bounds the peak of a prompt's pass and ends at the same
shares. Its taus were tuned per model and budget (0.4 to 2.3). While tokens are decoded (``eviction_every``) layers keep
the prompt's preferences, and entries compete by the rows since the last time; a single row has no variance.

Legend: B batch, N cached rows of the prompt, H query heads, h key-value heads, W rows of the window, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from subtoken_train.evictions.base import Eviction
from subtoken_train.evictions.budgets import competing_counts, divide_budget, protected_counts
from subtoken_train.evictions.observers import (
    kernel_setting,
    neighbours_pooled,
    over_groups,
    window_rows,
    window_setting,
)
from subtoken_train.view.method import by_settings, setting
from subtoken_train.view.scores import Candidates, Scores
from subtoken_train.view.view import Need, Online, View

LEAST = 1e-10  # inside the entropy's logarithm, as released
MOST = 1e6


@dataclass(frozen=True)
class CAKE(Eviction):
    """Mean and variance of the last rows' attention; the defaults are the release's.

    Attributes:
        window: last entries of the prompt that observe, and always stay: a whole number, or, between 0 and 1, their
            share of the layer's budget, rounded down, 1 at least.
        kernel: entries whose scores are averaged together, odd.
        gamma: weight of the variance in an entry's score.
        tau1: the larger, the less the entropy counts in a layer's preference.
        tau2: the larger, the less the variance counts.
    """

    name: ClassVar[str] = "cake"
    across_layers: ClassVar[bool] = True
    needs: ClassVar[frozenset[Need]] = frozenset({"rows"})

    window: int | float = window_setting(32)
    kernel: int = kernel_setting(5)
    gamma: float = setting(200.0, 0, MOST)
    tau1: float = setting(1.0, 1 / MOST, MOST)
    tau2: float = setting(1.0, 1 / MOST, MOST)

    online = by_settings(lambda self: Online(rows=self.window if isinstance(self.window, int) else None))

    def score(self, view: View) -> Scores:
        """The indicator of every entry before the window, [B, h, N]; the weight is the logarithm of the preference."""
        window_BN, index_BW = window_rows(view, self.window)
        rows_BHWN = view.rows(index_BW)
        there_BW = rows_BHWN[:, 0].sum(-1) > 0  # while tokens are decoded, some queries of a window may be gone
        before_BN = view.entries_BN & ~window_BN
        rows_BHWN = rows_BHWN.masked_fill(~before_BN[:, None, None], 0.0)
        count_B11 = there_BW.sum(-1)[:, None, None]
        mean_BHN = rows_BHWN.sum(2) / count_B11.clamp(min=1)
        away_BHWN = (rows_BHWN - mean_BHN[:, :, None]) * there_BW[:, None, :, None]
        variance_BHN = away_BHWN.square().sum(2) / (count_B11 - 1).clamp(min=1)
        pooled_BHN = neighbours_pooled(mean_BHN + self.gamma * variance_BHN, before_BN, self.kernel, "avg")
        entropy_B = -(rows_BHWN * (rows_BHWN + LEAST).log()).sum((1, 2, 3))
        preference_B = _log(entropy_B) / self.tau1 + _log(variance_BHN.sum((1, 2))) / self.tau2
        if view.carried is not None:  # the prompt's, which all entries of the last look have: the oldest is one
            oldest_B11 = view.entries_BN.int().argmax(-1)[:, None, None]
            preference_B = view.carried.gather(2, oldest_B11)[:, 0, 0]
        kv_heads = view.key_BhNd.shape[1]
        carried_BhN = preference_B[:, None, None].expand(-1, kv_heads, view.entries_BN.shape[1])
        return Scores(over_groups(pooled_BHN, kv_heads), window_BN, preference_B, carried=carried_BhN)

    def counts(self, scores: list[Scores], candidates: Candidates) -> Tensor:
        log_LB = torch.stack([each.weight_B for each in scores if each.weight_B is not None])
        window_LB = torch.minimum(protected_counts(scores, candidates), candidates.budget_LB)
        left_B = (candidates.budget_LB - window_LB).sum(0)
        free_LB = competing_counts(candidates) - window_LB
        return window_LB + divide_budget(log_LB.softmax(0), left_B, (1 - window_LB).clamp(min=0), free_LB)


def _log(positive_B: Tensor) -> Tensor:
    return positive_B.clamp(min=torch.finfo(torch.float32).tiny).log()
