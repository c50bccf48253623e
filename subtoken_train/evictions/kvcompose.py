"""KVCompose: each head keeps its best entries, and one pool says how many a layer keeps.

Source: "KVCompose: Efficient Structured KV Cache Compression with Composite Tokens", equations 14-24. The k-th entry
that stays in a layer is a composite token: the k-th best of every head. Its importance is the mean over the heads; all
composite tokens of all layers compete, and a layer keeps as many as win. Otherwise than in paper and release (which the
setting ``kvpress`` imitates), a layer (a head, if not structured) keeps an entry at least, unless ``lower_bound`` is 0,
and the budget is rounded layer by layer, unless ``exact_total`` is set.

With a question, its rows' attention counts; without one, as in the release, the context runs a second time after its
own cache, and its rows' does. While tokens are decoded (``eviction_every``, ours) the rows since the last eviction ask.

Legend: B batch, N cached rows of the prompt, H query heads, h key-value heads, L layers.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from subtoken_train.evictions.base import Eviction
from subtoken_train.evictions.budgets import aligned, competing_counts, pooled_counts, pooled_head_counts, score_curves
from subtoken_train.evictions.observers import over_groups, task_rows, unasked
from subtoken_train.view.method import by_settings, setting
from subtoken_train.view.scores import Candidates, Scores
from subtoken_train.view.view import Need, Online, View

Task = Literal["auto", "aware", "agnostic", "causal"]


@dataclass(frozen=True)
class KVCompose(Eviction):
    """KVCompose.

    Attributes:
        task: whose attention counts. ``aware``: the rows that ask, after the image or the context. ``agnostic``: all
            rows of the prompt, run a second time after its cache. ``causal``: all rows of the prompt in its own pass,
            which spares the second and costs most of the quality. ``auto``: ``aware`` for a prompt with a question,
            ``agnostic`` for one that ends with its image or context.
        structured: the same number of entries in every head of a layer; otherwise all heads of all layers compete in
            one pool, as entries of their own.
        composite: each head keeps its own best entries; otherwise all of a layer keep those of the best mean.
            Structured only.
        adaptive: the layers share one pool; otherwise each keeps its own budget. Structured only.
        kvpress: the first layer's curve of importance is the largest of all layers', rank by rank (structured only).
        value_norm: scores are multiplied by the norm of the value (an option of kvpress; off in the paper).
        lower_bound: entries that every layer (head, if not structured) keeps; 0, as in the paper and the release, may
            leave a layer none of what competes.
        exact_total: all layers' entries together are the budget's share of all, rounded down once (equation 21).
    """

    name: ClassVar[str] = "kvcompose"
    needs: ClassVar[frozenset[Need]] = frozenset({"blocks", "value_norms", "second_pass"})
    second_pass_advice: ClassVar[str] = "use the option task=causal, which runs it once and chooses worse"

    task: Task = "auto"
    structured: bool = True
    composite: bool = True
    adaptive: bool = True
    kvpress: bool = False
    value_norm: bool = False
    lower_bound: int = setting(1)
    exact_total: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for half in ("composite", "adaptive"):
            if not getattr(self, half) and not self.structured:
                raise ValueError(f"kvcompose {half}=False needs structured=True: without it every head is on its own")

    def score(self, view: View) -> Scores:
        among = None if self.task == "causal" else task_rows
        rows_BN = view.entries_BN if among is None else among(view.regions_BN)
        norm_BhN = view.value_norms() if self.value_norm else None
        received_BHN = view.received(rows_BN, largest=True, among=among)
        scores_BhN = head_scores(received_BHN, view.key_BhNd.shape[1], norm_BhN)
        mean = view.head_mean(scores_BhN)
        return Scores(scores_BhN + mean if self.composite else mean, torch.zeros_like(view.entries_BN))

    online = by_settings(lambda self: Online() if self.structured and self.composite and self.adaptive else None)
    heads_share = by_settings(lambda self: not self.composite)
    heads_differ = by_settings(lambda self: not self.structured)
    may_empty = by_settings(lambda self: not self.lower_bound)
    reads_question = by_settings(lambda self: self.task == "aware")

    def second_pass(self, regions_BN: Tensor) -> Tensor:
        unasked_B = unasked(regions_BN)
        return unasked_B if self.task == "auto" else torch.full_like(unasked_B, self.task == "agnostic")

    def score_task(self, view: View) -> Tensor:
        states = view.received(largest=True), view.value_BhNd.shape[1], view.value_norms() if self.value_norm else None
        return token_scores(*states) if self.composite else head_scores(*states).mean(1, keepdim=True)

    across_layers = by_settings(lambda self: self.adaptive)

    def counts(self, scores: list[Scores], candidates: Candidates) -> Tensor:
        if not self.adaptive:
            return candidates.budget_LB
        found = [each.scores_BhN for each in scores]
        if not self.structured:
            return pooled_head_counts(found, candidates, self.lower_bound, self._total(candidates, found[0].shape[1]))
        heads = candidates.heads  # of a composite token, which are rows of the batch while tokens are decoded
        found = [each.view(-1, heads * each.shape[1], each.shape[2]) for each in score_curves(found, candidates)]
        curve_BLN = aligned([each.mean(1, keepdim=True) for each in found])
        if self.kvpress:
            first_BN = curve_BLN.amax(1).masked_fill(curve_BLN[:, 0].isneginf(), -torch.inf)
            curve_BLN = torch.cat([first_BN[:, None], curve_BLN[:, 1:]], 1)
        count_LB = pooled_counts(curve_BLN, self._total(candidates), self.lower_bound).T.repeat_interleave(heads, 1)
        return torch.maximum(count_LB, competing_counts(candidates).clamp(max=min(1, self.lower_bound)))

    def _total(self, candidates: Candidates, heads: int = 1) -> Tensor:
        if not self.exact_total or candidates.exact_LB is None:
            return candidates.budget_LB[:, :: candidates.heads].sum(0) * heads
        # the decimal that was written: sums of millions of entries are off by more than a ninth digit
        return torch.floor(candidates.exact_LB.sum(0) * heads + 1e-6).long()


def head_scores(received_BHN: Tensor, kv_heads: int, norm_BhN: Tensor | None = None) -> Tensor:
    """Return the largest attention of any row, mean over a group, times ``norm_BhN`` (equations 14, 15), [B, h, N]."""
    scores_BhN = over_groups(received_BHN, kv_heads)
    return scores_BhN if norm_BhN is None else scores_BhN * norm_BhN


def token_scores(received_BHN: Tensor, kv_heads: int, norm_BhN: Tensor | None = None) -> Tensor:
    """Add to ``head_scores`` their mean over the key-value heads (equation 16), [B, h, N] in fp32."""
    scores_BhN = head_scores(received_BHN, kv_heads, norm_BhN)
    return scores_BhN + scores_BhN.mean(1, keepdim=True)
