"""Methods by the rows that ask: the prompt's last one (TOVA), the question's (Finch), each decoding step's (Quest).

Legend: B batch, N cached rows of the prompt, H query heads, h key-value heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from subtoken_train.evictions.base import Eviction
from subtoken_train.evictions.budgets import competing_counts
from subtoken_train.evictions.observers import column_sums, over_groups, task_rows
from subtoken_train.functional.gather import last_marked
from subtoken_train.types import Region
from subtoken_train.view.method import setting
from subtoken_train.view.scores import Candidates, Scale, Scores
from subtoken_train.view.view import Need, Online, View


@dataclass(frozen=True)
class TOVA(Eviction):
    """TOVA (Oren et al., 2024): the entries that the prompt's last row attends to, one set for all heads of a layer.

    Source: "Transformers are Multi-State RNNs" (2401.06104) and its code (``tova_cache.py`` @9c7d09b): attention of the
    last row, mean over all query heads. The paper evicts at every step while decoding, here after ``eviction_every``
    tokens, by the last one's row. The last row is the question's, or without a question the context's own.

    Attributes:
        protect_last: the prompt's last entry always stays, inside the budget (kvpress).
    """

    name: ClassVar[str] = "tova"
    absolute: ClassVar[Scale] = Scale(log=True, high=0.0)
    online: ClassVar[Online] = Online(rows=1)
    needs: ClassVar[frozenset[Need]] = frozenset({"rows"})
    heads_share: ClassVar[bool] = True

    protect_last: bool = False

    def score(self, view: View) -> Scores:
        scores_B1N = view.rows(view.last_rows(1))[:, :, 0].mean(1, keepdim=True)
        last_BN = last_marked(view.entries_BN, 1) if self.protect_last else torch.zeros_like(view.entries_BN)
        return Scores(scores_B1N, last_BN)


@dataclass(frozen=True)
class Finch(Eviction):
    """Finch (Corallo & Papotti, 2024): entries that the question attends to, its rows weighted by what they could see.

    Source: "FINCH: Prompt-guided Key-Value Cache Compression for Large Language Models" (2408.00167), its code and
    kvpress 0.5.4. The score is the attention of the question's rows, each times the number of entries up to it, mean
    over rows and a group's query heads. The question's entries stay; prompts without one, and contexts compressed
    before their question, are refused.

    A set per key-value head, as in kvpress (one for all heads in the paper). Both turn what stays to closed-up
    positions: ``rerotate: true`` here. The context is read whole.

    Attributes:
        normalise: weight every row by the number of entries up to it.
    """

    name: ClassVar[str] = "finch"
    needs: ClassVar[frozenset[Need]] = frozenset({"blocks"})
    needs_question: ClassVar[bool] = True

    normalise: bool = True

    def score(self, view: View) -> Scores:
        asking_BN = task_rows(view.regions_BN)
        weight_BN = view.entries_BN.cumsum(-1).float() if self.normalise else None
        sums_BHN = column_sums(view.blocks(asking_BN), weight_BN) / asking_BN.sum(-1).clamp(min=1)[:, None, None]
        scores_BhN = over_groups(sums_BHN, view.key_BhNd.shape[1])
        return Scores(scores_BhN.masked_fill(asking_BN[:, None], 0.0), asking_BN)


@dataclass(frozen=True)
class QuestSteps(Eviction):
    """Quest as published: all entries stay in memory, and every decoding step reads the pages that its query asks for.

    Source: "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference" (Tang et al., 2024), sections
    3.2-3.4, and its code. The smallest and largest value of each key channel in a page bound the logits of its entries;
    the pages with the largest bounds are read, in the first layers everything.

    **No bytes are freed**: ``eviction_keep`` is the share (or number) of the entries in scope that a step reads, tables
    say ``reads``, and the page index comes on top of the full cache. The reducer ``quest`` chooses pages once and drops
    the others. Pages are chosen per key-value head, by the mean of its query heads' bounds. Pages that hold an entry
    out of scope, the last page and what was generated since are always read; the budget is rounded down to pages;
    tokens that are not decoded one by one read everything. It does not go with value groups.

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
        return Scores(torch.zeros_like(view.entries_BN[:, None], dtype=torch.float32), view.entries_BN)

    def counts(self, scores: list[Scores], candidates: Candidates) -> Tensor:
        return competing_counts(candidates)

    def keep(self, scores: list[Scores], candidates: Candidates) -> list[Tensor]:
        return [(regions_BN != Region.PADDING)[:, None] for regions_BN in candidates.regions_LBN]

    def pages(self, layer: int) -> tuple[int, int] | None:
        return None if layer < self.dense_layers else (self.page_size, self.least_pages)
