"""Context reducers that an eviction's scores drive: blind to the question, in training and at inference.

A layer's ``View`` is made of the rows that stand before the question (the context, and a system prompt before it),
which is what the eviction sees under the protocol ``context_first``; its own ``score`` and ``at_budget`` score them.

One set for all heads: value groups are routed per token, and an entry's keys and values belong to all heads. The
eviction keeps a set for each key-value head; here the mean of a token's scores over the heads decides. On the embedded
language model that recalls more: Compactor's own sets 95.1 % of a context's facts at 21.875 % of its tokens, the mean's
96.6 % (``docs/trials.md``; one LoRA, 200 contexts).

What it does not do: scores never see routed values (they are what routing starts from), and no set is revised later.

Legend: B batch, N positions, h key-value heads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from subtoken_train.evictions.base import Eviction, keep_best_entries
from subtoken_train.reducers.context import ContextReducer
from subtoken_train.types import Region
from subtoken_train.view.view import View


@dataclass(frozen=True, kw_only=True)
class ScoredContext(ContextReducer, ABC):
    """Keeps the context tokens that an eviction's scores put first, in every layer a set of its own."""

    reads_question: ClassVar[bool] = False

    @property
    @abstractmethod
    def scorer(self) -> Eviction:
        """The eviction whose scores decide, with its settings."""

    @torch.no_grad()
    def keep_context(self, view: View) -> Tensor:
        """Mark the context tokens that stay in this layer, bool [B, N]: ``kept_tokens`` of each sample.

        Of a budget that does not hold all that the scorer protects, its latest stay, as under the eviction.
        """
        context_BN = view.in_scope_BN
        assert context_BN is not None
        counts = [self.kept_tokens(count) if count else 0 for count in view.scope_counts]
        count_B = torch.tensor(counts, device=context_BN.device)
        with torch.autocast(context_BN.device.type, enabled=False):  # training must choose what inference chooses
            scorer, seen = self.scorer, self._before_the_question(view, context_BN)
            scores = scorer.at_budget(scorer.score(seen), context_BN, count_B)
            mean_B1N = scores.scores_BhN.mean(1, keepdim=True)
        return keep_best_entries(mean_B1N, context_BN, scores.protected_BN, count_B, least=0)[:, 0]

    def _before_the_question(self, view: View, context_BN: Tensor) -> View:
        """The layer as an eviction sees it before the question is there."""
        entries_BN = context_BN | (view.regions_BN == Region.SYSTEM)
        assert view.position is not None
        last_B1 = view.position.masked_fill(~entries_BN, -1).amax(-1, keepdim=True)
        regions_BN = view.regions_BN.masked_fill(~entries_BN, Region.PADDING)
        return view.narrowed(regions_BN, last_B1 + 1, self.scorer.needs)
