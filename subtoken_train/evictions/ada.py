"""Ada-KV (Feng et al., 2024): heads of a layer share one budget, and those whose scores are higher keep more entries.

Source: "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference", Algorithms 1
and 2, and its release FFY0/AdaKV @efe4e2e. The best of all (head, entry) pairs of a layer stay, and a safeguard leaves
no head without entries: kvpress's ``floor`` (each head's best ``alpha * count`` entries come first) or the paper's
``blend`` (``1 - alpha`` of what a head won, and ``alpha`` of an equal share). The layer keeps exactly what its heads
had together under the base, where the release rounds every head by itself; nothing moves between layers. Heads win by
the scores of the innermost method: CriticalKV inside orders entries once the heads' counts are known, as in its paper.

The release's Ada-SnapKV is ``ada(snapkv)`` with ``safeguard: blend, normalise: true, snapkv.window: 32, snapkv.kernel:
7, snapkv.pooling: max, snapkv.pool_per: kv_head, snapkv.rows: mean``.

Legend: B batch, N cached rows of the prompt, h key-value heads, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from subtoken_train.evictions.base import Wrapper, keep_best_entries
from subtoken_train.evictions.budgets import divide_budget
from subtoken_train.ledger.kv_budget import exact
from subtoken_train.view.method import setting
from subtoken_train.view.scores import Candidates, Scores
from subtoken_train.view.view import View

Safeguard = Literal["floor", "blend"]


@dataclass(frozen=True)
class Ada(Wrapper):
    """A budget for all heads of a layer together, around a method that scores every head.

    Attributes:
        alpha: share of an equal budget that every head has in any case, in [0, 1]; 1 leaves the heads equal.
        safeguard: ``floor`` (kvpress) or ``blend`` (the paper).
        normalise: multiply a head's scores by the share of its sum that its best ``count`` entries hold (the release):
            heads that look at few entries win more. For scores of 0 or more.
    """

    name: ClassVar[str] = "ada"
    heads_differ: ClassVar[bool] = True

    alpha: float = setting(0.2, 0, 1)
    safeguard: Safeguard = "floor"
    normalise: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.base.heads_share:
            raise ValueError(self._no_heads())

    def _no_heads(self) -> str:
        return (
            f"ada divides a budget between heads, and {self.base.name} keeps one set for all heads of a layer; put it "
            "around a method with a set per head, for instance snapkv"
        )

    def score(self, view: View) -> Scores:
        """The base's scores, [B, h, N]."""
        found = self.base.score(view)
        if found.scores_BhN.shape[1] != view.key_BhNd.shape[1]:
            raise ValueError(self._no_heads())
        return found

    def counts(self, scores: list[Scores], candidates: Candidates) -> Tensor:
        base = self.base.counts(scores, candidates)
        heads = scores[0].scores_BhN.shape[1]
        total_LB = base.sum(-1) if base.dim() == 3 else base * heads
        counted = []
        for layer, competes_BN in enumerate(candidates.competes_LBN):
            its = self.inside[-1].at_budget(scores[layer], competes_BN, base[layer])
            scores_BhN = its.scores_BhN.float()
            if self.normalise:
                free_BN = competes_BN & ~its.protected_BN
                best_B = total_LB[layer] // heads - (competes_BN & its.protected_BN).sum(-1)
                scores_BhN = scores_BhN * self._concentration(scores_BhN, free_BN, best_B)
            counted.append(self._head_counts(scores_BhN, competes_BN, its.protected_BN, total_LB[layer]))
        return torch.stack(counted)

    def _concentration(self, scores_BhN: Tensor, free_BN: Tensor, count_B: Tensor) -> Tensor:
        if bool((scores_BhN.masked_fill(~free_BN[:, None], 0.0) < 0).any()):
            raise ValueError(f"ada normalise compares sums of scores, and those of {self.inside[-1].name} are below 0")
        return concentration(scores_BhN, free_BN, count_B)

    def _head_counts(self, scores_BhN: Tensor, competes_BN: Tensor, protected_BN: Tensor, total_B: Tensor) -> Tensor:
        heads, alpha = scores_BhN.shape[1], exact(self.alpha)
        if self.safeguard == "floor":
            floor_B = total_B * alpha.numerator // (alpha.denominator * heads)
            return pair_counts(scores_BhN, competes_BN, protected_BN, total_B, floor_B)
        won_Bh = pair_counts(scores_BhN, competes_BN, protected_BN, total_B, torch.zeros_like(total_B))
        return blended(won_Bh, competes_BN, protected_BN, self.alpha)


def pair_counts(
    scores_BhN: Tensor, competes_BN: Tensor, protected_BN: Tensor, total_B: Tensor, floor_B: Tensor
) -> Tensor:
    """Count the ``total_B`` best (head, entry) pairs by head, int64 [B, h].

    Args:
        scores_BhN: fp32; ties go to the lower head, then to the lower index.
        competes_BN: entries that are chosen among, bool.
        protected_BN: of them, those that every head keeps, as far as its equal share of the total goes, bool.
        total_B: pairs to keep, at least one per head (of entries that compete); more than there are keeps all.
        floor_B: a head's best entries that come before those of others, at most its equal share; at least one.
    """
    batch, heads, length = scores_BhN.shape
    equal_B = total_B // heads
    floor_B = torch.maximum(floor_B, torch.minimum((protected_BN & competes_BN).sum(-1), equal_B))
    first_BhN = keep_best_entries(scores_BhN, competes_BN, protected_BN, floor_B)
    limits = torch.finfo(torch.float32)
    rank_BhN = scores_BhN.float().clamp(limits.min, limits.max).masked_fill(first_BhN, torch.inf)
    flat = rank_BhN.masked_fill(~competes_BN[:, None], -torch.inf).flatten(1)
    order = flat.sort(dim=-1, descending=True, stable=True).indices
    within = torch.arange(heads * length, device=flat.device) < total_B[:, None]
    chosen = torch.zeros_like(within).scatter_(-1, order, within) & ~flat.isneginf()
    return chosen.view(batch, heads, length).sum(-1)


def blended(won_Bh: Tensor, competes_BN: Tensor, protected_BN: Tensor, alpha: float) -> Tensor:
    """``1 - alpha`` of what each head won and ``alpha`` of an equal share, in whole numbers of the same sum.

    A head has what is protected, as far as the equal share goes, and at least one entry.
    """
    device, heads = won_Bh.device, won_Bh.shape[1]
    won_Bh, entries_B, protected_B = (
        each.cpu() for each in (won_Bh, competes_BN.sum(-1), (protected_BN & competes_BN).sum(-1))
    )
    total_B = won_Bh.sum(-1)
    share_hB = ((1 - alpha) * won_Bh.double() + alpha * total_B[:, None].double() / heads).T
    least_B = torch.minimum(protected_B.clamp(min=1), total_B // heads)
    count_hB = divide_budget(share_hB, total_B, least_B.expand(heads, -1), entries_B.expand(heads, -1))
    return count_hB.T.to(device)


def concentration(scores_BhN: Tensor, free_BN: Tensor, count_B: Tensor) -> Tensor:
    """The share of each head's sum of scores that its best entries hold, [B, h, 1]; 1 where that sum is 0."""
    best = scores_BhN.masked_fill(~free_BN[:, None], 0.0).sort(dim=-1, descending=True).values
    within = torch.arange(best.shape[-1], device=best.device) < count_B[:, None]
    sum_Bh1 = best.sum(-1, keepdim=True)
    share = (best * within[:, None]).sum(-1, keepdim=True) / sum_Bh1.clamp(min=torch.finfo(best.dtype).tiny)
    return torch.where(sum_Bh1 > 0, share, 1.0)
