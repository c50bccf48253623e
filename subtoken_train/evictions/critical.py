"""CriticalKV (Feng et al., 2025): a second half of the budget goes by what an entry's value does to the layer's output.

Source: "Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective" (arXiv 2502.03805),
Algorithm 1, and kvpress 0.5.4. The first half of a head's budget goes to the base's best entries, the rest to the best
by (score + epsilon) times the L1 norm of W_o v, mean over a group's query heads (over all heads where they share a
set). With ``ada`` inside or around, halves are of each head's own count (the paper's CriticalAdaKV).

As released, negative scores (knorm, keydiff) are multiplied too, and a base that weighs by value norms
(``expected_attention.value_norm``) counts them twice. Epsilon is meant for mean attention (``snapkv.rows: mean``).
Values are those that the cache stores: a group that routing dropped weighs nothing.

Legend: B batch, N cached rows of the prompt, H query heads, h key-value heads, d head width, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar

import torch
from torch import Tensor

from subtoken_train.evictions.base import Wrapper, keep_best_entries
from subtoken_train.evictions.chunk import ChunkKV
from subtoken_train.ledger.kv_budget import exact
from subtoken_train.view.method import setting
from subtoken_train.view.scores import Scores
from subtoken_train.view.view import Need, View

ROWS = 1024  # of entries that are projected together, so that no [N, D] stands in memory
NORM = "projected norm"
FINITE = 1e30


@dataclass(frozen=True)
class CriticalKV(Wrapper):
    """Two stages, around a method whose scores say what an entry is worth.

    Attributes:
        first_share: share of the budget that stage 1 takes, in [0, 1]; 1 is the base.
        epsilon: added to scores in stage 2, 0 or more: entries without attention go by their norm alone.
    """

    name: ClassVar[str] = "critical"
    needs: ClassVar[frozenset[Need]] = frozenset({"values"})

    first_share: float = setting(0.5, 0, 1)
    epsilon: float = setting(1e-4, 0, inf)

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(isinstance(each, ChunkKV) for each in self.inside):
            inner = self.inside[-1].name
            raise ValueError(f"critical weighs entries and chunk ranks chunks of them; write chunk(critical({inner}))")

    def score(self, view: View) -> Scores:
        """The base's scores; ``notes`` has the projected norms, [B, h, N], or [B, 1, N] where heads share a set."""
        found = self.base.score(view)
        norm_BhN = projected_norm(view.value_BhNd, view.output_weight())
        if found.scores_BhN.shape[1] == 1:
            norm_BhN = norm_BhN.mean(1, keepdim=True)
        return replace(found, notes={**found.notes, NORM: norm_BhN})

    def at_budget(self, scores: Scores, competes_BN: Tensor, count_Bh: Tensor) -> Scores:
        """Scores of stage 2, with the entries of stage 1 above all others of their head."""
        its, share = self.base.at_budget(scores, competes_BN, count_Bh), exact(self.first_share)
        first_Bh = count_Bh * share.numerator // share.denominator
        stage_BhN = keep_best_entries(its.scores_BhN, competes_BN, its.protected_BN, first_Bh, least=0)
        return replace(its, scores_BhN=two_stages(its.scores_BhN, stage_BhN, scores.notes[NORM], self.epsilon))


def two_stages(scores_BhN: Tensor, first_BhN: Tensor, norm_BhN: Tensor, epsilon: float) -> Tensor:
    """(Score + epsilon) times norm, finite, fp32; marked entries are lifted above all others of their head."""
    finite = torch.finfo(torch.float32).max
    second = (scores_BhN.float().clamp(-finite, finite) + epsilon) * norm_BhN
    second = second.clamp(-FINITE, FINITE)
    lift_Bh1 = 2 * (second.amax(-1, keepdim=True) - second.amin(-1, keepdim=True)) + 1
    return torch.where(first_BhN, second + lift_Bh1, second)


def projected_norm(value_BhNd: Tensor, weight_DHd: Tensor) -> Tensor:
    """L1 norm of W_o v, mean over the query heads of a key-value head, [B, h, N] in fp32."""
    batch, heads, _, width = value_BhNd.shape
    weight_HdD = weight_DHd.float().T.view(-1, width, weight_DHd.shape[0])
    group = len(weight_HdD) // heads
    blocks = []
    for value in torch.split(value_BhNd.float(), ROWS, dim=2):
        norms = [(value[:, i // group] @ weight_dD).abs().sum(-1) for i, weight_dD in enumerate(weight_HdD)]
        blocks.append(torch.stack(norms, 1).view(batch, heads, group, -1).mean(2))
    return torch.cat(blocks, -1)
