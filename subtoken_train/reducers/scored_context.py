"""Context reducers that an eviction's scores drive: blind to the question, in training and at inference.

A layer's ``LayerView`` is made of the rows that stand before the question (the context, and a system prompt before it),
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
from subtoken_train.evictions.layer_views import LayerView
from subtoken_train.reducers.context import ContextReducer, ContextView
from subtoken_train.types import Region


@dataclass(frozen=True, kw_only=True)
class ScoredContext(ContextReducer, ABC):
    """Keeps the context tokens that an eviction's scores put first, in every layer a set of its own."""

    reads_question: ClassVar[bool] = False

    @property
    @abstractmethod
    def scorer(self) -> Eviction:
        """The eviction whose scores decide, with its settings."""

    @torch.no_grad()
    def keep_context(self, view: ContextView) -> Tensor:
        """Mark the context tokens that stay in this layer, bool [B, N]: ``kept_tokens`` of each sample.

        Of a budget that does not hold all that the scorer protects, its latest stay, as under the eviction.
        """
        device, context_BN = view.context_BN.device, view.context_BN
        counts = [self.kept_tokens(count) if count else 0 for count in view.context_counts]
        count_B = torch.tensor(counts, device=device)
        with torch.autocast(device.type, enabled=False):  # training must choose the tokens that inference chooses
            scorer, seen = self.scorer, self._before_the_question(view)
            scores = scorer.at_budget(scorer.score(seen), context_BN, count_B)
            mean_B1N = scores.scores_BhN.mean(1, keepdim=True)
        return keep_best_entries(mean_B1N, context_BN, scores.protected_BN, count_B, least=0)[:, 0]

    def _before_the_question(self, view: ContextView) -> LayerView:
        """The layer as an eviction sees it before the question is there."""
        entries_BN = view.context_BN | (view.regions_BN == Region.SYSTEM)
        last_B1 = view.position_BN.masked_fill(~entries_BN, -1).amax(-1, keepdim=True)
        return LayerView(
            view.layer,
            view.query_BHNd,
            view.key_BhNd,
            view.value_BhNd,
            view.regions_BN.masked_fill(~entries_BN, Region.PADDING),
            view.scale,
            self.scorer.needs,
            view.context_BN,
            position=view.position_BN,
            next_position=last_B1 + 1,
            rotate=view.rotate,
        )
