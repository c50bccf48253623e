"""Quest as published: all entries stay in memory, and every step of decoding reads the pages that its query asks for.

Source: "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference" (Tang et al., 2024), sections 3.2-3.4,
and its release (mit-han-lab/Quest). The smallest and largest value of each key channel in a page of 16 entries bound
the logits of its entries. The pages with the largest bounds are read; the first two layers read everything.

It evicts nothing: **no bytes are freed**. ``eviction_keep`` is the share (or number) of the entries in scope that a
step reads, tables say ``reads``, and the page index is stored on top of the full cache. The reducer ``quest`` chooses
pages once and drops the others.

Readings taken: pages are chosen per key-value head, by the mean of its query heads' bounds (the evaluation code lets
every query head choose); pages that hold an entry out of scope, the last page and what was generated since are always
read; the budget is rounded down to pages, and a budget of all entries reads all; tokens that are not decoded one by one
(a question after its context, a further turn) read everything.

It does not go with value groups, whose stored pieces are not laid out by pages. Legend: B batch, N cached rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from subtoken_train.evictions.base import Eviction
from subtoken_train.evictions.budgets import competing_counts
from subtoken_train.types import Region
from subtoken_train.view.method import setting
from subtoken_train.view.scores import Candidates, Scores
from subtoken_train.view.view import View


@dataclass(frozen=True)
class QuestSteps(Eviction):
    """Quest, a choice of pages in every step.

    Attributes:
        page_size: entries of a page.
        least_pages: pages that a step reads, whatever the budget.
        dense_layers: first layers that read everything.
    """

    name: ClassVar[str] = "quest_steps"
    heads_share: ClassVar[bool] = True
    reads: ClassVar[bool] = True

    page_size: int = setting(16, 1)
    least_pages: int = setting(3, 1)
    dense_layers: int = setting(2)

    def score(self, view: View) -> Scores:
        """Nothing is scored before a query is there: 0, [B, 1, N]."""
        return Scores(torch.zeros_like(view.entries_BN[:, None], dtype=torch.float32), view.entries_BN)

    def counts(self, scores: list[Scores], candidates: Candidates) -> Tensor:
        return competing_counts(candidates)

    def keep(self, scores: list[Scores], candidates: Candidates) -> list[Tensor]:
        return [(regions_BN != Region.PADDING)[:, None] for regions_BN in candidates.regions_LBN]

    def pages(self, layer: int) -> tuple[int, int] | None:
        return None if layer < self.dense_layers else (self.page_size, self.least_pages)
