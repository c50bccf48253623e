"""ExpectedAttention (Devoto et al., 2025): the attention that queries still to come are expected to pay.

Source: "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries Distribution"
(2510.00636), in the form of kvpress 0.5.4. Queries before their rotary embedding are taken to be normal, with the mean
and the covariance of the prompt's own (a question's among them). Turned by the mean rotation of the next ``future``
positions, they give an entry's expected exp(q.k) in closed form; its share among all entries, mean over a group, times
the norm of its value, is the score.

Legend: B batch, N cached rows of the prompt, H query heads, h key-value heads, G = H / h, d head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar

import torch
from torch import Tensor

from subtoken_train.evictions.base import Eviction
from subtoken_train.evictions.observers import over_groups
from subtoken_train.view.method import setting
from subtoken_train.view.scores import Scale, Scores
from subtoken_train.view.view import Need, View

FURTHEST = 1 << 16  # positions that are averaged


@dataclass(frozen=True)
class ExpectedAttention(Eviction):
    """Expected attention of future queries; the defaults are the release's.

    Attributes:
        future: positions after the prompt whose mean rotation the queries get.
        sinks: first entries of the prompt that always stay, inside the budget, and count in no statistic.
        covariance: of the queries, counts; otherwise their mean alone.
        value_norm: scores are multiplied by the norm of the value.
        epsilon: added to the expected attention before that; it does nothing where ``value_norm`` is off.
    """

    name: ClassVar[str] = "expected_attention"
    absolute: ClassVar[Scale] = Scale(log=True)
    needs: ClassVar[frozenset[Need]] = frozenset({"value_norms"})

    future: int = setting(512, 1, FURTHEST)
    sinks: int = setting(4)
    covariance: bool = True
    value_norm: bool = True
    epsilon: float = setting(0.0, 0, inf)

    def score(self, view: View) -> Scores:
        sinks_BN = view.entries_BN & (view.entries_BN.cumsum(-1) <= self.sinks)
        counted_BN = view.entries_BN & ~sinks_BN
        mean_BHd, covariance_BHdd = query_statistics(view.unrotated_queries(), counted_BN, self.covariance)
        ahead = torch.arange(self.future, device=view.next_position.device)
        rotation = view.rotate(view.next_position + ahead).mean()
        mean_BHd = rotation.turn(mean_BHd[:, :, None])[:, :, 0]
        if covariance_BHdd is not None:
            half_BHdd = rotation.turn(covariance_BHdd).transpose(-1, -2)
            covariance_BHdd = rotation.turn(half_BHdd).transpose(-1, -2)  # R C R^T
        logits_BHN = expected_logits(mean_BHd, covariance_BHdd, view.key_BhNd, view.scale)
        share_BHN = logits_BHN.masked_fill(~counted_BN[:, None], torch.finfo(torch.float32).min).softmax(-1)
        scores_BhN = over_groups(share_BHN, view.key_BhNd.shape[1])
        if self.value_norm:
            scores_BhN = (scores_BhN + self.epsilon) * view.value_norms()
        return Scores(scores_BhN.masked_fill(~counted_BN[:, None], 0.0), sinks_BN)


def query_statistics(query_BHNd: Tensor, counted_BN: Tensor, covariance: bool) -> tuple[Tensor, Tensor | None]:
    """Mean [B, H, d] and (biased) covariance [B, H, d, d] of counted rows; ``query_BHNd`` is overwritten."""
    count_B = counted_BN.sum(-1).clamp(min=1)[:, None, None]
    others_B1N1 = ~counted_BN[:, None, :, None]
    query_BHNd.masked_fill_(others_B1N1, 0.0)
    mean_BHd = query_BHNd.sum(2) / count_B
    if not covariance:
        return mean_BHd, None
    query_BHNd.sub_(mean_BHd[:, :, None]).masked_fill_(others_B1N1, 0.0)
    return mean_BHd, query_BHNd.transpose(-1, -2) @ query_BHNd / count_B[..., None]


def expected_logits(mean_BHd: Tensor, covariance_BHdd: Tensor | None, key_BhNd: Tensor, scale: float) -> Tensor:
    """Log of the expected exp(scale * q.k) over normal queries q, [B, H, N] in fp32."""
    batch, heads, width = mean_BHd.shape
    kv_heads, length = key_BhNd.shape[1:3]
    key_BhNd = key_BhNd.float()
    logits_BhGN = mean_BHd.view(batch, kv_heads, -1, width) @ key_BhNd.transpose(-1, -2) * scale
    if covariance_BHdd is not None:
        # one product for the query heads that share a key
        every_BhdGd = covariance_BHdd.view(batch, kv_heads, -1, width, width).transpose(2, 3)
        seen_BhNGd = (key_BhNd @ every_BhdGd.flatten(3)).view(batch, kv_heads, length, -1, width)
        spread_BhNG = (seen_BhNGd @ key_BhNd[..., None])[..., 0]
        logits_BhGN = logits_BhGN + spread_BhNG.transpose(-1, -2) * (0.5 * scale**2)
    return logits_BhGN.reshape(batch, heads, length)
