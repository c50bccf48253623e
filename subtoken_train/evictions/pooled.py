"""One budget for all heads of all layers, around a method that spends the same in each.

Source: KVzip's threshold over all layers and heads (arXiv 2505.23416), put around any score. The best of all (layer,
head, entry) triples of a sample stay; every head keeps one entry at least, and what the method protects comes before
everything else. The sum is exactly what the base would keep. ``kvzip`` and ``kvcompose`` do this of themselves.

What it does not do: scores are compared as they are, so it helps where they mean the same in every layer
(probabilities), and may harm where they do not (norms); nothing is scaled.

Legend: B batch, N cached rows of the prompt, h key-value heads, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from subtoken_train.evictions.base import Wrapper
from subtoken_train.evictions.budgets import pooled_head_counts, protected_first
from subtoken_train.view.scores import Candidates, Scores


@dataclass(frozen=True)
class Pooled(Wrapper):
    """A budget for all layers and heads together (layers alone, where the heads of the base share a set)."""

    name: ClassVar[str] = "pooled"
    across_layers: ClassVar[bool] = True
    heads_differ: ClassVar[bool] = True

    def counts(self, scores: list[Scores], candidates: Candidates) -> Tensor:
        base = self.base.counts(scores, candidates)
        layers = zip(scores, candidates.competes_LBN, base, strict=True)
        found = [protected_first(self.inside[-1].at_budget(*layer)) for layer in layers]
        each_LB = base.sum(-1) if base.dim() == 3 else base * found[0].shape[1]
        return pooled_head_counts(found, candidates, 1, each_LB.sum(0))
