"""Wrappers around a method: how much layers and heads keep, and what counts of an entry.

Legend: B batch, N cached rows of the prompt, H query heads, h key-value heads, d head width, D model width, L layers, C
chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from subtoken_train.calibrations import CalibratedNumbers
from subtoken_train.errors import check_range, refuse
from subtoken_train.evictions import budgets
from subtoken_train.evictions.base import Eviction, Wrapper, check_fitting, keep_best_entries
from subtoken_train.evictions.snapkv import HeadScores
from subtoken_train.ledger.kv_budget import exact
from subtoken_train.typed import checked
from subtoken_train.view.method import Method, setting
from subtoken_train.view.scores import Candidates, Scores
from subtoken_train.view.view import Need, View

SHARE = "head's share"
MOST = 1e100  # of a share, so that products with a budget and sums stay finite


@dataclass(frozen=True)
class PerLayer(Wrapper):
    """Each layer keeps its own share of the budget, from a list.

    Source: ``per_layer_compression_press.py`` of kvpress 0.5.4. The numbers are shares of the budget that is asked for:
    kvpress's ratios c_l are written 1 - c_l, and their mean is ``eviction_keep``. A method that divides the budget
    between layers itself divides what it is given here.

    Attributes:
        shares: a number for every layer, 0 or more; only their ratios count. Written ``4:3:2:1`` on a command line. A
            layer keeps at least one entry; what it cannot take goes to the others.
    """

    name: ClassVar[str] = "per_layer"
    across_layers: ClassVar[bool] = True

    shares: Sequence[float] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isinstance(self.shares, list | tuple) and self.shares):
            raise ValueError("per_layer needs shares, a number for every layer: 4:3:2:1, or [4, 3, 2, 1] in a file")
        object.__setattr__(self, "shares", tuple(self.shares))
        for share in checked(list[float], list(self.shares), "per_layer shares"):
            check_range("per_layer shares", share, 0, MOST)
        refuse((not any(self.shares), "per_layer shares are all 0; a layer must get something"))

    def check_shape(self, num_layers: int, num_kv_heads: int, head_dim: int) -> None:
        unlike = f"per_layer has {len(self.shares)} shares and the backbone {num_layers} layers; give one each"
        refuse((len(self.shares) != num_layers, unlike))
        super().check_shape(num_layers, num_kv_heads, head_dim)

    def counts(self, scores: list[Scores], candidates: Candidates) -> Tensor:
        weight_LB = torch.tensor(self.shares, dtype=torch.float64)[:, None] * candidates.budget_LB.cpu()
        budget_LB = budgets.divided(weight_LB, candidates)
        return self.base.counts(scores, replace(candidates, budget_LB=budget_LB, exact_LB=None))


@dataclass(frozen=True)
class LearnedBudgets(Wrapper):
    """LKV: every head keeps the share of all entries that was learned for it.

    Source: "LKV" (arXiv 2605.06676), its budgets per head alone; no code of it was found. ``subtoken-train calibrate
    lkv`` learns them on a method's scores.

    Attributes:
        calibration: file of the heads' shares; needed.
    """

    name: ClassVar[str] = "lkv"
    across_layers: ClassVar[bool] = True
    heads_differ: ClassVar[bool] = True
    calibrates: ClassVar[type[CalibratedNumbers]] = HeadScores
    calibrated = Method.calibrated  # its own; the base has another or none

    calibration: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sets_of_heads("lkv", self.base)

    def check_shape(self, num_layers: int, num_kv_heads: int, head_dim: int) -> None:
        self.check_named()
        super().check_shape(num_layers, num_kv_heads, head_dim)

    def score(self, view: View) -> Scores:
        found = self.base.score(view)
        share_h = self.numbers_of(view.layer, found.scores_BhN.device, "score")
        return replace(found, notes={**found.notes, SHARE: share_h.expand(found.scores_BhN.shape[:2])})

    def counts(self, scores: list[Scores], candidates: Candidates) -> Tensor:
        weight_LBh = torch.stack([each.notes[SHARE] for each in scores])
        layers, batch, heads = weight_LBh.shape
        most_TB = budgets.competing_counts(candidates).repeat_interleave(heads, 0)
        weight_TB, total_B = weight_LBh.mT.reshape(most_TB.shape), candidates.budget_LB.sum(0) * heads
        count_TB = budgets.divide_budget(weight_TB, total_B, torch.ones_like(most_TB), most_TB)
        return count_TB.view(layers, heads, batch).mT


def check_sets_of_heads(name: str, base: Eviction) -> None:
    """Raise ``ValueError`` where the heads of a layer share one set of entries."""
    kept = f"{base.name} keeps one set for all heads of a layer"
    instead = "put it around a method with a set per head, for instance snapkv"
    refuse((base.heads_share, f"{name} divides a budget between heads, and {kept}; {instead}"))


@dataclass(frozen=True)
class Pooled(Wrapper):
    """One budget for all heads of all layers.

    Source: KVzip's threshold over all layers and heads (arXiv 2505.23416), put around any score. The best of all
    (layer, head, entry) triples of a sample stay (layers alone, where the heads of the base share a set), as many as
    the base would keep; every head keeps one entry at least, and what the method protects comes first. Scores are
    compared as they are, which may harm where they do not mean the same in every layer (norms).
    """

    name: ClassVar[str] = "pooled"
    across_layers: ClassVar[bool] = True
    heads_differ: ClassVar[bool] = True

    def counts(self, scores: list[Scores], candidates: Candidates) -> Tensor:
        base = self.base.counts(scores, candidates)
        best_L = [self.inside[-1].at_budget(*each) for each in zip(scores, candidates.competes_LBN, base, strict=True)]
        check_fitting(self, best_L)
        found = list(map(budgets.protected_first, best_L))
        each_LB = base.sum(-1) if base.dim() == 3 else base * found[0].shape[1]
        return budgets.pooled_head_counts(found, candidates, 1, each_LB.sum(0))


@dataclass(frozen=True)
class ChunkKV(Wrapper):
    """ChunkKV (Liu et al., 2025): runs of neighbouring entries stay or go together, one set for all heads.

    Source: "ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context LLM Inference" (arXiv
    2502.00299) and kvpress 0.5.4. The entries that compete are cut into chunks; a chunk's score is the mean of its
    entries' over entries and heads, and the best chunks stay. The budget is met exactly, by the best entries of the
    first chunk that does not fit whole; protected entries stay beside the chunks and do not weigh in their means.
    Layers do not reuse each other's sets.

    Attributes:
        length: entries of a chunk.
    """

    name: ClassVar[str] = "chunk"
    heads_share: ClassVar[bool] = True

    length: int = setting(20, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        kept = f"heads of {self.base.name} keep different numbers of entries"
        refuse((self.base.heads_differ, f"chunk keeps one set for all heads, and {kept}"))

    def at_budget(self, scores: Scores, competes_BN: Tensor, count_Bh: Tensor) -> Scores:
        its = self.base.at_budget(scores, competes_BN, count_Bh)
        ranks_BN = chunk_ranks(its.scores_BhN, competes_BN, its.protected_BN, self.length)
        return replace(its, scores_BhN=-ranks_BN.float()[:, None])


def chunk_ranks(scores_BhN: Tensor, competes_BN: Tensor, protected_BN: Tensor, length: int) -> Tensor:
    """Rank entries, best chunk first and in it the best entry, int64 [B, N]; those that do not compete come last."""
    batch, _, rows = scores_BhN.shape
    score_BN = scores_BhN.float().clamp(-FINITE, FINITE).sum(1)
    # entries that compete stand together, so that padding moves no border and every mean is one sum
    packed_BN = competes_BN.int().sort(dim=-1, descending=True, stable=True).indices
    free_BN = (competes_BN & ~protected_BN).gather(-1, packed_BN)
    score_BN = score_BN.gather(-1, packed_BN)
    summed = score_BN * free_BN, free_BN.int()
    sums_BC, count_BC = (F.pad(each, (0, -rows % length)).view(batch, -1, length).sum(-1) for each in summed)
    mean_BC = torch.where(count_BC > 0, sums_BC / count_BC.clamp(min=1), -torch.inf)
    rank_BC = mean_BC.sort(dim=-1, descending=True, stable=True).indices.argsort(dim=-1)
    rank_BN = rank_BC.repeat_interleave(length, -1)[:, :rows].masked_fill(~competes_BN.gather(-1, packed_BN), rows)
    order_BN = score_BN.sort(dim=-1, descending=True, stable=True).indices
    order_BN = order_BN.gather(-1, rank_BN.gather(-1, order_BN).sort(dim=-1, stable=True).indices)
    return packed_BN.gather(-1, order_BN).argsort(-1)


ROWS = 1024  # of entries that are projected together, so that no [N, D] stands in memory
NORM = "projected norm"
FINITE = 1e30


@dataclass(frozen=True)
class CriticalKV(Wrapper):
    """CriticalKV (Feng et al., 2025): half of the budget goes by how much a value changes the layer's output.

    Source: arXiv 2502.03805, Algorithm 1, and kvpress 0.5.4. The first half of a head's budget goes to the base's best
    entries, the rest to the best by (score + epsilon) times the L1 norm of W_o v, mean over a group's query heads (over
    all heads where they share a set). With ``ada`` inside or around, halves are of each head's own count (the paper's
    CriticalAdaKV). As released, negative scores (knorm, keydiff) are multiplied too.

    Attributes:
        first_share: share of the budget that stage 1 takes, in [0, 1]; 1 is the base.
        epsilon: added to scores in stage 2, 0 or more; meant for mean attention (``snapkv.rows: mean``).
    """

    name: ClassVar[str] = "critical"
    needs: ClassVar[frozenset[Need]] = frozenset({"values"})

    first_share: float = setting(0.5, 0, 1)
    epsilon: float = setting(1e-4, 0, inf)

    def __post_init__(self) -> None:
        super().__post_init__()
        chunks = any(isinstance(each, ChunkKV) for each in self.inside)
        instead = f"write chunk(critical({self.inside[-1].name}))"
        refuse((chunks, f"critical weighs entries and chunk ranks chunks of them; {instead}"))

    def score(self, view: View) -> Scores:
        found = self.base.score(view)
        norm_BhN = projected_norm(view.value_BhNd, view.output_weight())
        if found.scores_BhN.shape[1] == 1:
            norm_BhN = norm_BhN.mean(1, keepdim=True)
        return replace(found, notes={**found.notes, NORM: norm_BhN})

    def at_budget(self, scores: Scores, competes_BN: Tensor, count_Bh: Tensor) -> Scores:
        its, share = self.base.at_budget(scores, competes_BN, count_Bh), exact(self.first_share)
        first_Bh = count_Bh * share.numerator // share.denominator
        known = (0, 0, its.scores_BhN.shape[-1])  # as little as that: nothing is read
        stage_BhN = keep_best_entries(its.scores_BhN, competes_BN, its.protected_BN, first_Bh, 0, known)
        return replace(its, scores_BhN=two_stages(its.scores_BhN, stage_BhN, scores.notes[NORM], self.epsilon))


def two_stages(scores_BhN: Tensor, first_BhN: Tensor, norm_BhN: Tensor, epsilon: float) -> Tensor:
    """Multiply score + epsilon by the norm, finite, fp32; marked entries rise above all others of their head."""
    finite = torch.finfo(torch.float32).max
    second = ((scores_BhN.float().clamp(-finite, finite) + epsilon) * norm_BhN).clamp(-FINITE, FINITE)
    lift_Bh1 = 2 * (second.amax(-1, keepdim=True) - second.amin(-1, keepdim=True)) + 1
    return torch.where(first_BhN, second + lift_Bh1, second)


def projected_norm(value_BhNd: Tensor, weight_DHd: Tensor) -> Tensor:
    """Return the L1 norm of W_o v, mean over the query heads of a key-value head, [B, h, N] in fp32."""
    batch, heads, _, width = value_BhNd.shape
    weight_HdD = weight_DHd.float().T.view(-1, width, weight_DHd.shape[0])
    group = len(weight_HdD) // heads
    blocks = []
    for value in torch.split(value_BhNd.float(), ROWS, dim=2):
        norms = [(value[:, i // group] @ weight_dD).abs().sum(-1) for i, weight_dD in enumerate(weight_HdD)]
        blocks.append(torch.stack(norms, 1).view(batch, heads, group, -1).mean(2))
    return torch.cat(blocks, -1)


@dataclass(frozen=True)
class Ada(Wrapper):
    """Ada-KV (Feng et al., 2024): heads of a layer share one budget, and those of higher scores keep more entries.

    Source: "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference", Algorithms
    1 and 2, and its release FFY0/AdaKV @efe4e2e. The best of all (head, entry) pairs of a layer stay, and a safeguard
    leaves no head without entries: kvpress's ``floor`` (each head's best ``alpha * count`` entries come first) or the
    paper's ``blend`` (``1 - alpha`` of what a head won, and ``alpha`` of an equal share). The layer keeps exactly what
    its heads had together under the base. Heads win by the scores of the innermost method.

    The release's Ada-SnapKV is ``ada(snapkv)`` with ``safeguard: blend, normalise: true, snapkv.window: 32,
    snapkv.kernel: 7, snapkv.pooling: max, snapkv.pool_per: kv_head, snapkv.rows: mean``.

    Attributes:
        alpha: share of an equal budget that every head has in any case, in [0, 1]; 1 leaves the heads equal.
        safeguard: ``floor`` (kvpress) or ``blend`` (the paper).
        normalise: multiply a head's scores by the share of its sum that its best ``count`` entries hold (release).
    """

    name: ClassVar[str] = "ada"
    heads_differ: ClassVar[bool] = True

    alpha: float = setting(0.2, 0, 1)
    safeguard: Literal["floor", "blend"] = "floor"
    normalise: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sets_of_heads("ada", self.base)

    def counts(self, scores: list[Scores], candidates: Candidates) -> Tensor:
        base = self.base.counts(scores, candidates)
        heads = scores[0].scores_BhN.shape[1]
        total_LB = base.sum(-1) if base.dim() == 3 else base * heads
        share = exact(self.alpha) if self.safeguard == "floor" else exact(0)
        counted, always, below = [], [], list[Tensor]()
        best_L = list(map(self.inside[-1].at_budget, scores, candidates.competes_LBN, base))
        check_fitting(self, best_L)
        for its, competes_BN, total_B in zip(best_L, candidates.competes_LBN, total_LB, strict=False):
            scores_BhN = its.scores_BhN.float()
            always.append((competes_BN & its.protected_BN).sum(-1))
            if self.normalise:
                free_BN = competes_BN & ~its.protected_BN
                best_B = total_B // heads - always[-1]
                best_BhN = scores_BhN.masked_fill(~free_BN[:, None], 0.0).sort(dim=-1, descending=True).values
                below.append((best_BhN < 0).any())
                within_BN = torch.arange(best_BhN.shape[-1], device=best_B.device) < best_B[:, None]
                sum_Bh1, least = best_BhN.sum(-1, keepdim=True), torch.finfo(torch.float32).tiny
                share_Bh1 = (best_BhN * within_BN[:, None]).sum(-1, keepdim=True) / sum_Bh1.clamp(min=least)
                scores_BhN = scores_BhN * torch.where(sum_Bh1 > 0, share_Bh1, 1.0)
            floor_B = total_B * share.numerator // (share.denominator * heads)
            counted.append(pair_counts(scores_BhN, competes_BN, its.protected_BN, total_B, floor_B))
        if below and bool(torch.stack(below).any()):
            raise ValueError(f"ada normalise compares sums of scores, and those of {self.inside[-1].name} are below 0")
        won_LBh = torch.stack(counted)
        if self.safeguard == "floor":
            return won_LBh
        won_hT, always_T = won_LBh.flatten(0, 1).T, torch.cat(always)  # columns of all layers and samples
        total_T, entries_hT = won_hT.sum(0), budgets.competing_counts(candidates).flatten().expand(heads, -1)
        share_hT = (1 - self.alpha) * won_hT.cpu().double() + self.alpha * total_T.cpu().double() / heads
        least_hT = torch.minimum(always_T.clamp(min=1), total_T // heads).expand(heads, -1)
        return budgets.divide_budget(share_hT, total_T, least_hT, entries_hT).T.to(won_hT.device).reshape(won_LBh.shape)


def pair_counts(
    scores_BhN: Tensor, competes_BN: Tensor, protected_BN: Tensor, total_B: Tensor, floor_B: Tensor
) -> Tensor:
    """Count the ``total_B`` best (head, entry) pairs by head, int64 [B, h]; ties go to the lower head, then the index.

    Every head has its protected entries, and its ``floor_B`` best ones, as far as its equal share of the total goes,
    and one at least. More pairs than there are keeps all.
    """
    equal_B = total_B // scores_BhN.shape[1]
    floor_B = torch.maximum(floor_B, torch.minimum((protected_BN & competes_BN).sum(-1), equal_B))
    known = (0, 0, scores_BhN.shape[-1])  # as little as that: nothing is read
    first_BhN = keep_best_entries(scores_BhN, competes_BN, protected_BN, floor_B, known=known)
    limits = torch.finfo(torch.float32)
    rank_BhN = scores_BhN.float().clamp(limits.min, limits.max).masked_fill(first_BhN, torch.inf)
    return budgets.pooled_counts(rank_BhN.masked_fill(~competes_BN[:, None], -torch.inf), total_B, 0)
