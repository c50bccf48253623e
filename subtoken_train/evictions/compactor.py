"""Compactor (Chari & Van Durme, 2025): keys that stand out, and what a chunk attends to both ways.

Source: "Compactor: Calibrated Query-Agnostic KV Cache Compression with Approximate Leverage Scores" (2507.08143), in
the form of kvpress 0.5.4. The first and the last few entries always stay. For all others: (a) approximate leverage of
the keys before their rotary embedding, from a Gaussian sketch; (b) attention without a causal mask inside chunks,
summed over a chunk's rows, mean over a group, times the norm of the value, mean of three neighbours. Each is
standardised over a prompt's heads and entries (there, over its batch); the score is ``blending`` (a) + (b). A
question's rows are scored and observe like any others. The sketch is drawn from a seed, the same for every prompt. No
calibration of the budget per prompt (the paper's second half).

Legend: B batch, N cached rows of the prompt, n rows of one sample that are scored, H query heads, h key-value heads, d
head width, k width of the sketch, C rows of a chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from subtoken_train.evictions.base import Eviction
from subtoken_train.evictions.observers import over_groups
from subtoken_train.view.method import setting
from subtoken_train.view.scores import Scores
from subtoken_train.view.view import Need, View

JITTER, TRIES, NEIGHBOURS = 1e-2, 8, 3


def gaussian_sketch(heads: int, width: int, sketch_width: int, seed: int) -> Tensor:
    """Normal numbers of variance 1 / k, [h, d, k] in fp32 on the CPU; the same for a seed on every device."""
    generator = torch.Generator().manual_seed(seed)
    drawn_hdk: Tensor = torch.randn(heads, width, sketch_width, generator=generator)
    return drawn_hdk / math.sqrt(sketch_width)


def leverage_scores(vectors_hNd: Tensor, sketch_hdk: Tensor) -> Tensor:
    """Leverage of every vector among its head's, [h, N] in fp32: diag(X (X^T X + jitter)^-1 X^T), 0 or more.

    X are the vectors less their mean, times the sketch. A jitter that leaves the matrix of some head without a Cholesky
    factor is raised tenfold for all.
    """
    centred_hNd = vectors_hNd.float() - vectors_hNd.float().mean(1, keepdim=True)
    x_hNk = centred_hNd @ sketch_hdk
    gram_hkk = x_hNk.transpose(-1, -2) @ x_hNk
    identity_kk = torch.eye(gram_hkk.shape[-1], device=gram_hkk.device)
    for attempt in range(TRIES):
        factor_hkk, failed_h = torch.linalg.cholesky_ex(gram_hkk + JITTER * 10**attempt * identity_kk)
        if not bool(failed_h.any()):
            break
    else:
        raise AssertionError("vectors without a Cholesky factor")
    # |L^-1 x|^2 is x^T G^-1 x
    half_hkN = torch.linalg.solve_triangular(factor_hkk, x_hNk.transpose(-1, -2), upper=False)
    scores_hN: Tensor = half_hkN.square().sum(1)
    return scores_hN


def standardised(values: Tensor) -> Tensor:
    """Less their mean, over their (unbiased) standard deviation, all numbers together; 0 where all are the same."""
    centred = values - values.mean()
    deviation = (centred.square().sum() / max(values.numel() - 1, 1)).sqrt()
    return centred / deviation.clamp(min=1e-6)


@dataclass(frozen=True)
class Compactor(Eviction):
    """Leverage of the keys and chunked attention.

    Attributes:
        sinks: first entries of the prompt that always stay, inside the budget.
        last: last entries of the prompt likewise.
        chunk: entries that attend to each other.
        sketch: width of the Gaussian sketch.
        blending: factor of the leverage; None: the share of the competing entries that is removed.
        scaled: attention scores are divided by the root of the head width; the release does not.
        masked: the last chunk is as long as what is left. The release fills it up with zeros that take part, as keys
            with weight exp(0) and as rows that look at all alike. It recalls as much (98.6 and 68.3 % of a text's facts
            at a quarter and an eighth of the cache, masked 99.0 and 67.6), but an
            entry's score then depends on how much is missing to a whole chunk.
        seed: of the sketch.
    """

    name: ClassVar[str] = "compactor"
    needs: ClassVar[frozenset[Need]] = frozenset({"values"})

    sinks: int = setting(8)
    last: int = setting(4)
    chunk: int = setting(256, 1, 4096)
    sketch: int = setting(48, 1, 4096)
    blending: float | None = setting(None, 0, math.inf)
    scaled: bool = False
    masked: bool = True
    seed: int = setting(0, 0, 1 << 32)

    def score(self, view: View) -> Scores:
        """The attention part, [B, h, N], plus the leverage part (note ``leverage``) where ``blending`` is given."""
        place_BN = view.entries_BN.cumsum(-1)
        inner_BN = (place_BN > self.sinks) & (place_BN <= view.entries_BN.sum(-1, keepdim=True) - self.last)
        inner_BN = inner_BN & view.entries_BN
        key_BhNd = view.unrotated_keys()
        _, kv_heads, _, width = key_BhNd.shape
        sketch_hdk = gaussian_sketch(kv_heads, width, self.sketch, self.seed * 1_000 + view.layer).to(key_BhNd.device)
        attention_BhN, leverage_BhN = (torch.zeros_like(key_BhNd[..., 0]) for _ in range(2))
        for sample, inner_N in enumerate(inner_BN):  # chunks and means are those of its own entries
            rows_n = inner_N.nonzero()[:, 0]
            if not len(rows_n):
                continue
            own_hnd = key_BhNd[sample].index_select(1, rows_n)
            leverage_BhN[sample][:, rows_n] = standardised(leverage_scores(own_hnd, sketch_hdk))
            attention_BhN[sample][:, rows_n] = standardised(self._attention(view, sample, rows_n))
        found = Scores(attention_BhN, view.entries_BN & ~inner_BN, notes={"leverage": leverage_BhN})
        return found if self.blending is None else _blended(found, self.blending)

    def at_budget(self, scores: Scores, competes_BN: Tensor, count_Bh: Tensor) -> Scores:
        """Without a ``blending`` of its own: the leverage part is added with the removed share, mean over the heads."""
        if self.blending is not None:
            return scores
        count_B = count_Bh.float() if count_Bh.dim() == 1 else count_Bh.float().mean(-1)
        removed_B = 1 - count_B / competes_BN.sum(-1).clamp(min=1)
        return _blended(scores, removed_B.clamp(min=0)[:, None, None])

    def _attention(self, view: View, sample: int, rows_n: Tensor) -> Tensor:
        """Part (b) of one sample before it is standardised, [h, n]."""
        query_Hnd, key_hnd, value_hnd = (
            each[sample].index_select(1, rows_n).float() for each in (view.query_BHNd, view.key_BhNd, view.value_BhNd)
        )
        scale = view.scale if self.scaled else 1.0
        sums_Hn = chunk_attention_sums(query_Hnd, key_hnd, self.chunk, scale, self.masked)
        scores_hn = over_groups(sums_Hn[None], len(key_hnd))[0] * value_hnd.norm(dim=-1)
        return F.avg_pool1d(scores_hn[None], NEIGHBOURS, stride=1, padding=NEIGHBOURS // 2)[0]


def chunk_attention_sums(query_Hnd: Tensor, key_hnd: Tensor, chunk: int, scale: float, masked: bool) -> Tensor:
    """Attention that every key receives from its chunk's rows, both ways, [H, n]; not ``masked``: zeros fill up."""
    heads, length, width = query_Hnd.shape
    parts = []
    for start in range(0, length, chunk):
        query_HCd, key_hCd = query_Hnd[:, start : start + chunk], key_hnd[:, start : start + chunk]
        rows = key_hCd.shape[1]
        if not masked:
            query_HCd, key_hCd = (F.pad(each, (0, 0, 0, chunk - rows)) for each in (query_HCd, key_hCd))
        grouped = query_HCd.reshape(len(key_hCd), -1, width)  # the query heads of a key head, row after row
        probability = (grouped @ key_hCd.transpose(-1, -2) * scale).softmax(-1)
        parts.append(probability.view(heads, -1, key_hCd.shape[1]).sum(1)[:, :rows])
    return torch.cat(parts, 1)


def _blended(scores: Scores, factor: Tensor | float) -> Scores:
    return replace(scores, scores_BhN=scores.scores_BhN + factor * scores.notes["leverage"])
