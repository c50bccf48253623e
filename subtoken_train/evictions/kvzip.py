"""KVzip: entries stay by the largest attention that they receive while the model says the context again, in pieces.

Source: "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction" (arXiv 2505.23416), its code
(snu-mllab/KVzip) and kvpress 0.5.4. For each chunk of the context, rows run after the whole cache: a sentence that asks
for it, and the chunk itself. Their softmax is taken anew over the first entries (sinks), the chunk and the rows up to
each; an entry scores the largest probability of any row and query head of its group. One threshold for all layers and
heads says what stays, so heads keep unlike numbers of entries.

The context is what lies between the first and the last visual or context token. What stands outside of it competes
under scope ``all`` alone, and scores 1, so that the context goes first, as in both releases. The budget is met exactly,
and every head keeps an entry at least unless ``lower_bound`` is 0: kvpress then keeps the very same entries. Where a
chat template opens the prompt, the sentence ends and the answer opens as that template does it. KVzip+ and scores
stored for a model's heads are not offered.

Legend: B batch, N positions or cached rows of the prompt, C entries that a task looks at, H query heads, h key-value
heads, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from subtoken_train.evictions.base import Eviction
from subtoken_train.evictions.budgets import Pool, counts_of_pool
from subtoken_train.evictions.observers import column_largest, over_groups
from subtoken_train.types import Region, in_compressed_region
from subtoken_train.view.method import by_settings, setting
from subtoken_train.view.scores import Candidates, Scale, Scores
from subtoken_train.view.view import Need, Opening, TaskPlan, View

FIRST = "\n\nRepeat the previous context exactly."
LATER = "\n\nRepeat the part of the previous context exactly, starting with"
ANSWER = Opening("\n")
HINT = 8  # last tokens of the chunk before that a later sentence names

Level = Literal["token", "head"]


@dataclass(frozen=True)
class KVzip(Eviction):
    """KVzip.

    Attributes:
        chunk: tokens of the context that are repeated at a time; the original's 2,000 and kvpress's 2,048 keep what
            exists beside the cache small.
        sinks: first entries of the prompt that every task sees beside its chunk.
        level: ``token`` keeps the best entries; ``head`` the best heads, by their best entry, each whole as long as the
            budget lasts.
        pool: what shares a budget: ``global`` all layers and heads (the paper), ``layer`` the heads of a layer
            (kvpress's ``layerwise``), ``head`` each head for itself (the original's ``uniform``).
        lower_bound: entries that every head keeps, where it has them; 0, as in the releases, may leave a head none of
            what competes.
    """

    name: ClassVar[str] = "kvzip"
    needs: ClassVar[frozenset[Need]] = frozenset({"second_pass"})
    second_pass_advice: ClassVar[str] = "repeat less at a time (option chunk)"
    evenly: ClassVar[Mapping[str, Any]] = {"level": "token", "pool": "head", "lower_bound": 1}

    chunk: int = setting(2048, 1)
    sinks: int = setting(4)
    level: Level = "token"
    pool: Pool = "global"
    lower_bound: int = setting(1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.level == "head" and self.pool == "head":
            raise ValueError(
                "kvzip level=head keeps whole heads, so heads must share a budget: use pool global or layer"
            )

    absolute = by_settings(lambda self: Scale(log=True, high=0.0) if self.level == "token" else None)

    may_empty = by_settings(lambda self: not self.lower_bound)

    across_layers = by_settings(lambda self: self.pool == "global")

    def score(self, view: View) -> Scores:
        """1 for entries outside of the context; the others are scored by the tasks, [B, h, N]."""
        outside_BN = view.entries_BN & ~repeated_context(view.regions_BN)
        scores_BhN = outside_BN[:, None].float().expand(-1, view.key_BhNd.shape[1], -1)
        return Scores(scores_BhN, torch.zeros_like(outside_BN))

    def second_pass(self, regions_BN: Tensor) -> Tensor:
        return torch.ones_like(regions_BN[:, 0], dtype=torch.bool)

    def tasks(self, regions_BN: Tensor) -> list[TaskPlan]:
        """A task for every chunk of the longest context."""
        context_BN = repeated_context(regions_BN)
        place_BN = torch.where(context_BN, context_BN.cumsum(-1) - 1, -1)
        plans = []
        for start in range(0, int(place_BN.max()) + 1, self.chunk):
            about_BN = (place_BN >= start) & (place_BN < start + self.chunk)
            said = (FIRST,) if not start else (LATER, (place_BN >= max(0, start - HINT)) & (place_BN < start))
            plans.append(TaskPlan((*said, ANSWER, about_BN), about_BN))
        return plans

    def score_task(self, view: View) -> Tensor:
        """Scores of the entries of the task's chunk, [B, h, N]; 0 elsewhere."""
        entries_BN = view.regions_BN != Region.PADDING
        sinks_BN = entries_BN & (entries_BN.cumsum(-1) <= self.sinks)
        chosen, index_BC = view.among(view.about_BN | sinks_BN)
        largest_BHC = self.weighed(view, column_largest(chosen.blocks()), index_BC)
        scores_BhC = over_groups(largest_BHC, view.value_BhNd.shape[1], "max")
        scores_BhN = scores_BhC.new_zeros(*scores_BhC.shape[:2], entries_BN.shape[1])
        # padding of the choice points to row 0 and scores 0
        return scores_BhN.scatter_reduce(-1, index_BC[:, None].expand_as(scores_BhC), scores_BhC, "amax")

    def weighed(self, view: View, largest_BHC: Tensor, index_BC: Tensor) -> Tensor:
        """Largest attention of every query head to entries that stand at some places, unchanged unless overridden."""
        return largest_BHC

    def counts(self, scores: list[Scores], candidates: Candidates) -> Tensor:
        found = [each.scores_BhN for each in scores]
        if self.level == "head":  # every entry scores what the best competing one of its head does
            layers = zip(found, candidates.competes_LBN, strict=True)
            best = [each.masked_fill(~own_BN[:, None], 0.0).amax(-1, keepdim=True) for each, own_BN in layers]
            found = [best_Bh1.expand_as(each) for best_Bh1, each in zip(best, found, strict=True)]
        return counts_of_pool(found, candidates, self.pool, self.lower_bound)


def repeated_context(regions_BN: Tensor) -> Tensor:
    """Mark the prompt from the first visual or context token to the last, bool [B, N]; without any, all of it."""
    entries_BN, body_BN = regions_BN != Region.PADDING, in_compressed_region(regions_BN)
    inside_BN = (body_BN.cumsum(-1) > 0) & (body_BN.flip(-1).cumsum(-1).flip(-1) > 0)
    return entries_BN & (inside_BN | ~body_BN.any(-1, keepdim=True))
