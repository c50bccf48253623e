"""H2O (Zhang et al., 2023): heavy hitters, the entries that gathered most attention, and the recent ones.

Source: Algorithm 1 of "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models", once,
after the prompt: an entry's score is the sum of its column of the causal attention matrix. The paper gives recent
entries half of the budget; its code and KVCache-Factory a fixed number (``window``). Recent are the last of the prompt:
where only the context competes they stay anyway and cost no budget. While tokens are decoded (``eviction_every``) sums
go on. Samples are not added up, as that code does; ``normalise`` takes away the advantage of early entries, which more
rows see.
Cost: the attention matrix is computed a second time, a block of rows at a time.

Legend: B batch, N cached rows of the prompt, H query heads, h key-value heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from subtoken_train.evictions.base import Eviction, layer_count, protect_last
from subtoken_train.evictions.observers import GroupReduction, column_sums, over_groups, share_of, window_setting
from subtoken_train.view.method import setting
from subtoken_train.view.scores import Scores
from subtoken_train.view.view import Need, Online, View


@dataclass(frozen=True)
class H2O(Eviction):
    """Accumulated attention of the whole prompt, and a recent share of the budget.

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
        """Column sums of the attention over all rows of the prompt, [B, h, N]; nothing is protected yet."""
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
