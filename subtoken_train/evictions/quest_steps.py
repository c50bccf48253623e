"""Quest as published: all entries stay in memory, and every step of decoding reads the pages that its query asks for.

Source: "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference" (Tang et al., 2024), sections 3.2-3.4,
and its release (mit-han-lab/Quest, ``evaluation/quest_attention.py`` and the CUDA kernels). A page is 16 consecutive
entries; it is known by the smallest and largest value of each key channel, which bound the logit that any of its
entries can have. The pages with the largest bounds are read; the first two layers read everything.

It evicts nothing: **no bytes are freed**. What ``eviction_keep`` says is the share (or number) of the entries in scope
that a step reads, tables say ``reads``, and the page index is stored on top of the full cache. The reducer ``quest``
is the other reading: pages are chosen once and the others are gone.

Choices where the release leaves one:
  - pages are chosen per key-value head, by the mean of the bounds of its query heads. The evaluation code repeats keys
    and lets every query head choose, so that heads of a group read up to all of each other's pages; the CUDA kernels
    serve models without groups, where both are the same;
  - pages that hold an entry out of scope (text, the last row) are always read, and so are the last page, begun or
    whole, as in the CUDA kernels, and what was generated since;
  - the budget is rounded down to pages, since pages are what saves traffic, and tables count what is read, entry by
    entry; a budget of all entries reads all: the evaluation code drops a page where the entries do not fill the last;
  - tokens that are not decoded one by one (a question that follows its context, a further turn, what is scored) read
    everything, as in the release.

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
