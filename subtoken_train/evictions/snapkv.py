"""SnapKV (Li et al., 2024): the last rows of the prompt say which entries matter, neighbours together.

Source: Listing 1 of "SnapKV: LLM Knows What You are Looking for Before Generation" and its released code: attention of
the last ``window`` rows, summed over them, smoothed over neighbouring entries; the window itself stays.
Re-implementations differ in the sum over rows, the pooling, and whether grouped query heads are reduced before or after
it; each is a setting. Every key-value head has one set, where the released code repeats keys for all query heads.
``eviction_every`` evicts while decoding too, by the rows decoded since the last time.
The window is the end of the prompt. Where only the context competes, what follows the context observes and costs no
budget. Where nothing follows it, or everything competes, the window is inside the budget: one as long as the budget
leaves no choice, one that is a share of it (``observers.py``) always does.

Legend: B batch, N cached rows of the prompt, H query heads, h key-value heads, W rows of the window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from subtoken_train.evictions.base import Eviction
from subtoken_train.evictions.observers import (
    GroupReduction,
    Pooling,
    kernel_setting,
    neighbours_pooled,
    over_groups,
    window_rows,
    window_setting,
)
from subtoken_train.view.scores import Scale, Scores
from subtoken_train.view.view import Need, Online, View

PoolPer = Literal["query_head", "kv_head"]
RowReduction = Literal["sum", "mean"]


@dataclass(frozen=True)
class SnapKV(Eviction):
    """Pooled attention of the last rows; the defaults are those of the released code's class.

    Attributes:
        window: last entries of the prompt that observe, and always stay: a whole number, or, between 0 and 1, their
            share of the layer's budget, rounded down, 1 at least.
        kernel: entries that are pooled together, odd.
        pooling: ``avg`` (what hangs over an edge counts as 0) or ``max`` (its ties go to the lower index).
        pool_per: pool the scores of every ``query_head`` and then reduce a group, or a ``kv_head``'s reduced scores.
        rows: ``sum`` or ``mean`` over the window's rows; a scale that changes no set of a head, unless ``critical``
            adds its epsilon, or a threshold decides, which needs ``mean``.
        group: over the query heads of a key-value head, ``mean`` or ``max``.
    """

    name: ClassVar[str] = "snapkv"
    needs: ClassVar[frozenset[Need]] = frozenset({"rows"})

    window: int | float = window_setting(64)
    kernel: int = kernel_setting(5)
    pooling: Pooling = "avg"
    pool_per: PoolPer = "query_head"
    rows: RowReduction = "sum"
    group: GroupReduction = "mean"

    @property
    def online(self) -> Online | None:
        return Online(rows=self.window if isinstance(self.window, int) else None)

    @property
    def observing_rows(self) -> int | None:
        return self.window if isinstance(self.window, int) else None

    @property
    def absolute(self) -> Scale | None:
        return Scale(log=True, high=0.0) if self.rows == "mean" and isinstance(self.window, int) else None

    def score(self, view: View) -> Scores:
        """Pooled attention of the window's rows, [B, h, N], 0 inside the window, which is protected."""
        window_BN, index_BW = window_rows(view, self.window)
        scores = view.rows(index_BW).sum(2)
        if self.rows == "mean":
            scores = scores / (index_BW >= 0).sum(-1).clamp(min=1)[:, None, None]
        kv_heads, before_BN = view.key_BhNd.shape[1], view.entries_BN & ~window_BN
        how = before_BN, self.kernel, self.pooling
        if self.pool_per == "query_head":
            scores = over_groups(neighbours_pooled(scores, *how), kv_heads, self.group)
        else:
            scores = neighbours_pooled(over_groups(scores, kv_heads, self.group), *how)
        return Scores(scores, window_BN)
