"""KVCompose: each head keeps its own best entries, and one pool over all layers says how many a layer keeps.

Source: "KVCompose: Efficient Structured KV Cache Compression with Composite Tokens", equations 14-24. The k-th entry
that stays in a layer is a composite token: the k-th best of every head, which may be another token in each. Its
importance is the mean over the heads, all composite tokens of all layers compete, and a layer keeps as many as win.

Setting ``kvpress`` imitates the release in NVIDIA's kvpress, which takes, rank by rank, the largest importance of any
layer for the first layer's. What differs from both: a layer (a head, if not structured) keeps at least one entry, where
that release may empty it. A total that ties would exceed goes to the lower layer.

Whose attention counts is the task. With a question, it is the question. Without one, as in the release, it is the
context itself: it runs a second time after its own cache, and what these rows look at is what it takes to say it again.

Legend: B batch, N cached rows of the prompt, H query heads, h key-value heads, L layers, R runs that share a pool
(layers, or heads of layers).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from subtoken_train.errors import check_word
from subtoken_train.evictions.base import Candidates, Eviction, LayerScores
from subtoken_train.evictions.budgets import competing_counts
from subtoken_train.evictions.layer_views import LayerView, Need, TaskView
from subtoken_train.evictions.observers import Blocks, over_groups, task_rows, unasked

Task = Literal["auto", "aware", "agnostic", "causal"]


@dataclass(frozen=True)
class KVCompose(Eviction):
    """KVCompose.

    Attributes:
        task: whose attention counts. ``aware``: the rows that ask, after the image or the context (``task_rows``).
            ``agnostic``: all rows of the prompt, run a second time after its cache, which takes another pass over them
            and twice the positions. ``causal``: all rows of the prompt in its own pass, which spares that and costs
            most of the quality: recall of a text's facts is 14 % at half of the cache where the second pass has 94, 8
            where it has 76 at a quarter (``benchmarks/recall_peers.py``).
            ``auto``: ``aware`` for a prompt with a question, ``agnostic`` for one that ends with its image or context.
        structured: the same number of entries in every head of a layer; otherwise all heads of all layers compete in
            one pool, as entries of their own.
        kvpress: the first layer's curve of importance is the largest of all layers', rank by rank (structured only).
        value_norm: scores are multiplied by the norm of the value (an option of kvpress; off in the paper).
        lower_bound: entries that every layer (head, if not structured) keeps, where it has them.
    """

    name: ClassVar[str] = "kvcompose"
    needs: ClassVar[frozenset[Need]] = frozenset({"blocks", "value_norms", "second_pass"})

    task: Task = "auto"
    structured: bool = True
    kvpress: bool = False
    value_norm: bool = False
    lower_bound: int = 1

    def __post_init__(self) -> None:
        check_word("kvcompose task", self.task, get_args(Task))
        if self.lower_bound < 1:
            raise ValueError(f"kvcompose lower_bound={self.lower_bound} must be 1 or more: no layer can be empty")

    def score(self, view: LayerView) -> LayerScores:
        """Scores per key-value head, [B, h, N] (equation 16)."""
        rows_BN = view.entries_BN if self.task == "causal" else task_rows(view.regions_BN)
        norm_BhN = view.value_norms() if self.value_norm else None
        scores_BhN = token_scores(view.blocks(rows_BN), view.key_BhNd.shape[1], norm_BhN)
        return LayerScores(scores_BhN, torch.zeros_like(view.entries_BN))

    @property
    def reads_question(self) -> bool:
        """See ``Eviction.reads_question``."""
        return self.task == "aware"

    def second_pass(self, regions_BN: Tensor) -> Tensor:
        """See ``Eviction.second_pass``."""
        unasked_B = unasked(regions_BN)
        return unasked_B if self.task == "auto" else torch.full_like(unasked_B, self.task == "agnostic")

    def score_task(self, view: TaskView) -> Tensor:
        """Scores per key-value head from the second pass, [B, h, N]: the release's, all rows of the task counting."""
        norm_BhN = view.value_norms() if self.value_norm else None
        return token_scores(view.blocks(), view.value_BhNd.shape[1], norm_BhN)

    @property
    def across_layers(self) -> bool:
        """See ``Eviction.across_layers``: all layers are one pool."""
        return True

    def counts(self, scores: list[LayerScores], candidates: Candidates) -> Tensor:
        """Entries per layer, int64 [L, B]; not structured: of every head, [L, B, h]."""
        if not self.structured:
            return self.head_counts(scores, candidates)
        curve_BLN = _aligned([each.mean(1, keepdim=True) for each in _curves(scores, candidates)])
        if self.kvpress:
            curve_BLN = first_is_largest(curve_BLN)
        count_LB = pooled_counts(curve_BLN, candidates.budget_LB.sum(0), self.lower_bound).T
        return torch.maximum(count_LB, competing_counts(candidates).clamp(max=1))

    def head_counts(self, scores: list[LayerScores], candidates: Candidates) -> Tensor:
        """Entries per layer and head, int64 [L, B, h], from one pool of all heads."""
        kv_heads = scores[0].scores_BhN.shape[1]
        total_B = candidates.budget_LB.sum(0) * kv_heads
        count_BR = pooled_counts(_aligned(_curves(scores, candidates)), total_B, self.lower_bound)
        count_LBh = count_BR.view(-1, len(scores), kv_heads).transpose(0, 1)
        return torch.maximum(count_LBh, competing_counts(candidates).clamp(max=1)[..., None])


def token_scores(blocks: Blocks, kv_heads: int, norm_BhN: Tensor | None = None) -> Tensor:
    """Scores of the entries (equations 14 to 16), [B, h, N] in fp32.

    The largest attention that any row pays, mean over the query heads of a key-value head, plus the mean of that over
    the key-value heads.

    Args:
        blocks: attention of the task's rows, at least one in the whole batch.
        kv_heads: h.
        norm_BhN: factor of each head's score, before the mean over heads is added.
    """
    largest_BHN: Tensor | None = None
    for _, probability_BHWN in blocks:
        block_BHN = probability_BHWN.amax(2)
        largest_BHN = block_BHN if largest_BHN is None else torch.maximum(largest_BHN, block_BHN)
    assert largest_BHN is not None
    scores_BhN = over_groups(largest_BHN, kv_heads)
    if norm_BhN is not None:
        scores_BhN = scores_BhN * norm_BhN
    return scores_BhN + scores_BhN.mean(1, keepdim=True)


def score_curve(scores_BhN: Tensor, competes_BN: Tensor) -> Tensor:
    """Scores of the competing entries of each head, best first (equation 18), [B, h, N]; -inf after the last."""
    return scores_BhN.masked_fill(~competes_BN[:, None], -torch.inf).sort(dim=-1, descending=True).values


def first_is_largest(curve_BLN: Tensor) -> Tensor:
    """Kvpress's curves: the first layer's importance at each rank is the largest of any layer."""
    first_BN = curve_BLN.amax(1).masked_fill(curve_BLN[:, 0].isneginf(), -torch.inf)
    return torch.cat([first_BN[:, None], curve_BLN[:, 1:]], 1)


def pooled_counts(curve_BRN: Tensor, total_B: Tensor, lower_bound: int) -> Tensor:
    """How many of each run are among the best of all (equations 20 to 22), int64 [B, R].

    Args:
        curve_BRN: falling curves of importance, -inf after the last entry.
        total_B: size of the selection, int64.
        lower_bound: the first entries of each run, which come before all others; the very first before those.

    Ties go to the lower run.
    """
    batch, runs, length = curve_BRN.shape
    flat = curve_BRN.reshape(batch, -1)
    place = torch.arange(runs * length, device=flat.device) % length
    early = (place < lower_bound).int() + (place < min(lower_bound, 1)).int()
    order = flat.sort(dim=-1, descending=True, stable=True).indices
    classes = torch.where(flat.isneginf(), -1, early).gather(-1, order)
    order = order.gather(-1, classes.sort(dim=-1, descending=True, stable=True).indices)
    within = torch.arange(runs * length, device=flat.device) < total_B[:, None]
    chosen = torch.zeros_like(within).scatter_(-1, order, within) & ~flat.isneginf()
    return chosen.view(batch, runs, length).sum(-1)


def _curves(scores: list[LayerScores], candidates: Candidates) -> list[Tensor]:
    """``score_curve`` of every layer."""
    return [
        score_curve(each.scores_BhN, competes_BN)
        for each, competes_BN in zip(scores, candidates.competes_LBN, strict=True)
    ]


def _aligned(curves: list[Tensor]) -> Tensor:
    """Curves [B, R_l, N_l] of all layers in one tensor [B, sum of R_l, largest N_l], -inf after the last entry."""
    length = max(each.shape[-1] for each in curves)
    return torch.cat(
        [torch.nn.functional.pad(each, (0, length - each.shape[-1]), value=-torch.inf) for each in curves], 1
    )
