"""ChunkKV (Liu et al., 2025): runs of neighbouring entries stay or go together, one set for all heads.

Source: "ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context LLM Inference" (arXiv 2502.00299)
and kvpress 0.5.4. The entries that compete are cut into chunks of ``length``; a chunk's score is the mean of its
entries' over entries and heads, and the best chunks stay.
What differs from kvpress: the budget is met exactly, by the best entries of the first chunk that does not fit whole;
protected entries stay beside the chunks and do not weigh in their means; every sample has chunks of its own. What it
does not do: layers do not reuse each other's sets.

Legend: B batch, N cached rows of the prompt, h key-value heads, L layers, C chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from subtoken_train.evictions.base import Wrapper
from subtoken_train.view.method import setting
from subtoken_train.view.scores import Candidates, Scores

FINITE = 1e30  # of a score, so that sums of many are finite


@dataclass(frozen=True)
class ChunkKV(Wrapper):
    """Chunks of entries, around any method that counts per layer.

    Attributes:
        length: entries of a chunk.
    """

    name: ClassVar[str] = "chunk"
    heads_share: ClassVar[bool] = True

    length: int = setting(20, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.base.heads_differ:
            raise ValueError(self._heads_differ())

    def _heads_differ(self) -> str:
        return f"chunk keeps one set for all heads, and heads of {self.base.name} keep different numbers of entries"

    def counts(self, scores: list[Scores], candidates: Candidates) -> Tensor:
        count_LB = self.base.counts(scores, candidates)
        if count_LB.dim() == 3:
            raise ValueError(self._heads_differ())
        return count_LB

    def at_budget(self, scores: Scores, competes_BN: Tensor, count_Bh: Tensor) -> Scores:
        """Scores that order entries chunk by chunk, [B, 1, N]."""
        its = self.base.at_budget(scores, competes_BN, count_Bh)
        ranks_BN = chunk_ranks(its.scores_BhN, competes_BN, its.protected_BN, self.length)
        return replace(its, scores_BhN=-ranks_BN.float()[:, None])


def chunk_ranks(scores_BhN: Tensor, competes_BN: Tensor, protected_BN: Tensor, length: int) -> Tensor:
    """Places of the entries when the best chunk comes first and its best entry before its others, int64 [B, N].

    A chunk's score is the mean of its entries that are not protected, summed over heads. Ties go to the lower chunk,
    then to the lower index. Entries that do not compete come last.
    """
    batch, _, rows = scores_BhN.shape
    score_BN = scores_BhN.float().clamp(-FINITE, FINITE).sum(1)
    # entries that compete stand together, so that padding moves no border and every mean is one sum
    packed_BN = competes_BN.int().sort(dim=-1, descending=True, stable=True).indices
    free_BN = (competes_BN & ~protected_BN).gather(-1, packed_BN)
    score_BN = score_BN.gather(-1, packed_BN)
    missing = -rows % length
    sums_BC, count_BC = (
        F.pad(each, (0, missing)).view(batch, -1, length).sum(-1) for each in (score_BN * free_BN, free_BN.int())
    )
    mean_BC = torch.where(count_BC > 0, sums_BC / count_BC.clamp(min=1), -torch.inf)
    rank_BC = mean_BC.sort(dim=-1, descending=True, stable=True).indices.argsort(dim=-1)
    rank_BN = rank_BC.repeat_interleave(length, -1)[:, :rows].masked_fill(~competes_BN.gather(-1, packed_BN), rows)
    order_BN = score_BN.sort(dim=-1, descending=True, stable=True).indices
    order_BN = order_BN.gather(-1, rank_BN.gather(-1, order_BN).sort(dim=-1, stable=True).indices)
    return torch.empty_like(order_BN).scatter_(
        -1, packed_BN.gather(-1, order_BN), torch.arange(rows, device=order_BN.device).expand_as(order_BN)
    )
