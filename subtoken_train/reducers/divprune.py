"""DivPrune (Alvar et al., 2025, arXiv:2503.02175): keep the visual tokens that are farthest from each other.

As released (vbdi/divprune @799e2d9): among the projected visual features, distance being 1 - cosine, the first is the
one whose nearest other is farthest away; then, again and again, the one whose nearest chosen one is (greedy max-min).
Neither attention nor the question is read, so it serves every family that sees images.

What differs: kept tokens keep their positions, the count is rounded as everywhere here, distances are in fp32, and all
images of a sample are pruned together. Newlines are all alike, so that one stays at most while any other token is left.
The last token of a prompt that ends with its image stays, in place of the last one that is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from subtoken_train.functional.diversity import farthest_places, unit_rows
from subtoken_train.reducers.base import RankingReducer
from subtoken_train.view.view import View


@dataclass(frozen=True, kw_only=True)
class DivPrune(RankingReducer):
    """DivPrune; its ranking is the order in which tokens are chosen."""

    name: str = "divprune"

    ranks: ClassVar[bool] = True

    def scores(self, view: View) -> Tensor:
        """Return how early each token is chosen, negated, [B, N]."""
        visual_BN = view.visual
        steps = max(self.kept_counts(visual_BN))
        return -farthest_places(unit_rows(view.hidden_BND), visual_BN, steps)
