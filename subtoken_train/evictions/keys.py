"""Methods that read no attention of the model's own: places, chance, keys, and keys and values beside their neighbours.

Legend: B batch, N cached rows of the prompt, n rows of one sample, H query heads, h key-value heads, d head width, P
partitions, W entries of one, k width of a sketch, C rows of a chunk.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from subtoken_train.evictions.base import Eviction
from subtoken_train.evictions.observers import over_groups
from subtoken_train.functional.hashing import uniform_hash
from subtoken_train.types import Region
from subtoken_train.view.method import setting
from subtoken_train.view.scores import Scale, Scores
from subtoken_train.view.view import Need, Online, View


@dataclass(frozen=True)
class StreamingLLM(Eviction):
    """StreamingLLM (Xiao et al., 2024): the first few entries and the most recent ones, whatever they hold.

    Source: sections 3.1-3.2 of "Efficient Streaming Language Models with Attention Sinks" and its code, which turns
    keys to closed-up positions: ``rerotate: true`` here. Sinks are the first entries of the whole prompt, recent ones
    the last of what competes. KVCache-Factory's class of that name fixes the window: ``sinks`` = capacity - window.

    Attributes:
        sinks: first entries that always stay, inside the budget.
    """

    name: ClassVar[str] = "streaming_llm"
    online: ClassVar[Online] = Online(rows=0)
    heads_share: ClassVar[bool] = True

    sinks: int = setting(4)

    def score(self, view: View) -> Scores:
        place_BN = view.entries_BN.cumsum(-1)
        return Scores(place_BN[:, None].float(), view.entries_BN & (place_BN <= self.sinks))


@dataclass(frozen=True)
class RandomEviction(Eviction):
    """Control: entries at random, in every layer and head anew.

    Scores are a hash of (seed, layer, head, place among the sample's entries), the same in every run and any batch.

    Attributes:
        seed: which random choice.
    """

    name: ClassVar[str] = "random"
    absolute: ClassVar[Scale] = Scale(low=0.0, high=1.0)

    seed: int = 0

    def score(self, view: View) -> Scores:
        place_BN = view.entries_BN.cumsum(-1)
        heads_h1 = torch.arange(view.key_BhNd.shape[1], device=place_BN.device)[:, None]
        scores_BhN = uniform_hash(heads_h1, place_BN[:, None], view.layer, self.seed)
        return Scores(scores_BhN, view.entries_BN.new_zeros(view.entries_BN.shape))


@dataclass(frozen=True)
class KNorm(Eviction):
    """Key norm (Devoto et al., 2024): entries whose keys are short stay.

    Source: "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression". There the first layers stay whole.
    """

    name: ClassVar[str] = "knorm"
    needs: ClassVar[frozenset[Need]] = frozenset({"key_norms"})

    def score(self, view: View) -> Scores:
        return Scores(-view.key_norms(), view.entries_BN.new_zeros(view.entries_BN.shape))


SHORTEST = 1e-12  # length that a vector has at least where it is divided by its length


@dataclass(frozen=True)
class KeyDiff(Eviction):
    """KeyDiff (Park et al., 2025): entries whose keys are unlike the prompt's average key stay.

    Source: arXiv 2504.15364, in the form of kvpress 0.5.4: minus the cosine similarity of an entry's rotated key to the
    mean of all normalised keys. The paper evicts in blocks; nothing is protected.
    """

    name: ClassVar[str] = "keydiff"
    absolute: ClassVar[Scale] = Scale(low=-1.0, high=1.0)

    def score(self, view: View) -> Scores:
        return Scores(-anchor_similarity(view.key_BhNd, view.entries_BN), torch.zeros_like(view.entries_BN))


def anchor_similarity(key_BhNd: Tensor, entries_BN: Tensor) -> Tensor:
    """Return every key's cosine similarity to the mean of the entries' normalised keys, [B, h, N] in fp32."""
    key_BhNd = key_BhNd.float()
    share_BhN = 1 / key_BhNd.norm(dim=-1).clamp(min=SHORTEST)
    weight_BhN = share_BhN * entries_BN[:, None]  # the anchor's own length divides out
    anchor_Bhd1 = (weight_BhN[:, :, None] @ key_BhNd).transpose(-1, -2)
    length_Bh11 = anchor_Bhd1.norm(dim=-2, keepdim=True).clamp(min=SHORTEST)
    similarity_BhN: Tensor = (key_BhNd @ (anchor_Bhd1 / length_Bh11))[..., 0] * share_BhN
    return similarity_BhN


@dataclass(frozen=True)
class LagKV(Eviction):
    """LagKV (Liang et al., 2025): entries that vary most on the scale of the entries after them.

    Source: arXiv 2504.04704, in the form of kvpress 0.5.4. After the sinks the prompt is cut into partitions. The
    smallest and the largest value of each channel in the *next* partition are 0 and 1 for this one's keys and values;
    an entry's spread over the channels, softmax within the partition, mean of key and value, is ranked there. The last
    whole partition and what follows it stay. A channel that is constant in the next partition is left out.

    Attributes:
        sinks: first entries of the prompt that always stay, inside the budget.
        lag: entries of a partition.
        cross_scoring: entries of all partitions compete by their scores, not by ranks within their own.
    """

    name: ClassVar[str] = "lagkv"
    needs: ClassVar[frozenset[Need]] = frozenset({"values"})

    sinks: int = setting(4)
    lag: int = setting(128, 2)
    cross_scoring: bool = False

    def score(self, view: View) -> Scores:
        entries_BN = view.entries_BN
        batch, kv_heads, length, _ = view.key_BhNd.shape
        scores_BhN = torch.zeros(batch, kv_heads, length, device=entries_BN.device)
        protected_BN = torch.zeros_like(entries_BN)
        for sample, rows_n in enumerate(view.places()):  # partitions begin at a sample's own
            states = [each[sample].index_select(1, rows_n).float() for each in (view.key_BhNd, view.value_BhNd)]
            scores_hn, protected_n = self._score_sample(*states)
            scores_BhN[sample][:, rows_n] = scores_hn
            protected_BN[sample][rows_n] = protected_n
        return Scores(scores_BhN, protected_BN)

    def _score_sample(self, key_hnd: Tensor, value_hnd: Tensor) -> tuple[Tensor, Tensor]:
        kv_heads, length, _ = key_hnd.shape
        place_n = torch.arange(length, device=key_hnd.device)
        if (partitions := (length - self.sinks) // self.lag) < 2:
            late_n = (place_n - self.sinks) / max(length - self.sinks, 1)
            return late_n.clamp(min=0).expand(kv_heads, -1), place_n < self.sinks
        body = slice(self.sinks, self.sinks + partitions * self.lag)
        cut = (each[:, body].reshape(kv_heads, partitions, self.lag, -1) for each in (key_hnd, value_hnd))
        of_key, of_value = (lag_spread(each).softmax(-1) for each in cut)
        scores_hPW = (of_key + of_value) / 2
        if not self.cross_scoring:
            scores_hPW = scores_hPW.argsort(dim=-1, stable=True).argsort(dim=-1) / self.lag
        scores_hn = torch.ones(kv_heads, length, device=key_hnd.device)
        scored = slice(self.sinks, self.sinks + (partitions - 1) * self.lag)
        scores_hn[:, scored] = scores_hPW.flatten(1)
        return scores_hn, (place_n < scored.start) | (place_n >= scored.stop)


def lag_spread(states_hPWd: Tensor) -> Tensor:
    """Return the deviation over channels, each scaled by the next partition's extremes, [h, P - 1, W]."""
    low, high = states_hPWd[:, 1:].aminmax(dim=2, keepdim=True)
    span = high - low
    told = span > 0
    relative = ((states_hPWd[:, :-1] - low) / span).masked_fill(~told, 0.0)
    count = told.sum(-1)
    mean = (relative.sum(-1) / count.clamp(min=1))[..., None]
    return (((relative - mean).square() * told).sum(-1) / (count - 1).clamp(min=1)).sqrt()


@dataclass(frozen=True)
class CUR(Eviction):
    """CurDKV (Sengupta et al., 2025): entries whose keys and values have much leverage among their neighbours.

    Source: arXiv 2509.15038, its authors' press, and kvpress 0.5.4, whose defaults these are. The leverage of a key,
    and of a value, is its squared norm as a share of that of its window of 16 entries; the score is their product, over
    the sum of a head's. No sketch estimates norms (off by default there); windows begin at a prompt's first entry.

    Attributes:
        sinks: first entries of the prompt that always stay, inside the budget.
        leverage: ``product`` or ``mean`` of a key's and a value's, or one of them.
        local: entries of a window; 0: squared norms of the whole prompt compete as they are.
    """

    name: ClassVar[str] = "cur"
    needs: ClassVar[frozenset[Need]] = frozenset({"values"})

    sinks: int = setting(4)
    leverage: Literal["product", "mean", "key", "value"] = "product"
    local: int = setting(16)

    def score(self, view: View) -> Scores:
        place_BN = view.entries_BN.cumsum(-1) - 1
        states = view.key_BhNd, view.value_BhNd
        key_BhN, value_BhN = (leverage(each, view.entries_BN, place_BN, self.local) for each in states)
        joined = {"product": key_BhN * value_BhN, "mean": (key_BhN + value_BhN) / 2, "key": key_BhN, "value": value_BhN}
        scores_BhN = joined[self.leverage]
        share_BhN = scores_BhN / scores_BhN.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        return Scores(share_BhN, view.entries_BN & (place_BN < self.sinks))


def leverage(states_BhNd: Tensor, entries_BN: Tensor, place_BN: Tensor, local: int) -> Tensor:
    """Return squared norms, [B, h, N] in fp32, 0 where nothing is; with ``local``, as shares of their window's sum."""
    square_BhN = states_BhNd.float().square().sum(-1).masked_fill(~entries_BN[:, None], 0.0)
    if not local:
        return square_BhN
    window_BhN = (place_BN.clamp(min=0) // local)[:, None].expand_as(square_BhN)
    total_BhN = torch.zeros_like(square_BhN).scatter_add(-1, window_BhN, square_BhN).gather(-1, window_BhN)
    return (square_BhN / total_BhN).masked_fill(total_BhN == 0, 0.0)


JITTER, TRIES, NEIGHBOURS = 1e-2, 8, 3


def gaussian_sketch(heads: int, width: int, sketch_width: int, seed: int) -> Tensor:
    """Draw normal numbers of variance 1 / k, [h, d, k] in fp32; the CPU draws, so a seed gives the same anywhere."""
    drawn_hdk: Tensor = torch.randn(heads, width, sketch_width, generator=torch.Generator().manual_seed(seed))
    return drawn_hdk / math.sqrt(sketch_width)


def leverage_scores(vectors_hNd: Tensor, sketch_hdk: Tensor) -> Tensor:
    """Return each vector's leverage in its head, [h, N] in fp32: diag(X (X^T X + jitter)^-1 X^T), 0 or more."""
    x_hNk = (vectors_hNd.float() - vectors_hNd.float().mean(1, keepdim=True)) @ sketch_hdk
    gram_hkk = x_hNk.transpose(-1, -2) @ x_hNk
    identity_kk = torch.eye(gram_hkk.shape[-1], device=gram_hkk.device)
    tries = [gram_hkk + JITTER * 10**attempt * identity_kk for attempt in range(TRIES)]
    factor_Thkk, failed_Th = torch.linalg.cholesky_ex(torch.stack(tries))
    served_T = (failed_Th == 0).all(-1)  # the first that serves is taken, NaN where none does: nothing is read
    factor_hkk = factor_Thkk[served_T.int().argmax(keepdim=True)][0].where(served_T.any(), torch.nan)
    # |L^-1 x|^2 is x^T G^-1 x
    scores_hN: Tensor = torch.linalg.solve_triangular(factor_hkk, x_hNk.transpose(-1, -2), upper=False).square().sum(1)
    return scores_hN


def standardised(values: Tensor) -> Tensor:
    """Subtract the mean and divide by the (unbiased) deviation of all numbers together; 0 where all are equal."""
    centred = values - values.mean()
    return centred / (centred.square().sum() / max(values.numel() - 1, 1)).sqrt().clamp(min=1e-6)


@dataclass(frozen=True)
class Compactor(Eviction):
    """Compactor (Chari & Van Durme, 2025): entries whose keys stand out, or that their chunk attends to.

    Source: arXiv 2507.08143, in the form of kvpress 0.5.4. The first and the last few entries always stay. For all
    others: (a) approximate leverage of the keys before their rotary embedding, from a Gaussian sketch; (b) attention
    without causal mask and scale inside chunks, summed over a chunk's rows, mean over a group, times the norm of the
    value, mean of three neighbours. Each is standardised over a prompt's heads and entries (there, over its batch); the
    score is ``blending`` (a) + (b). No calibration of the budget per prompt (the paper's second half).

    Attributes:
        sinks: first entries of the prompt that always stay, inside the budget.
        last: last entries of the prompt likewise.
        chunk: entries that attend to each other.
        sketch: width of the Gaussian sketch.
        blending: factor of the leverage; None: the share of the competing entries that is removed.
        masked: the last chunk is as long as what is left; the release fills it up with zeros that take part.
        seed: of the sketch.
    """

    name: ClassVar[str] = "compactor"
    needs: ClassVar[frozenset[Need]] = frozenset({"values"})
    left: ClassVar[Mapping[str, Any]] = {"scaled": False}

    sinks: int = setting(8)
    last: int = setting(4)
    chunk: int = setting(256, 1, 4096)
    sketch: int = setting(48, 1, 4096)
    blending: float | None = setting(None, 0, math.inf)
    masked: bool = True
    seed: int = setting(0, 0, 1 << 32)

    def score(self, view: View) -> Scores:
        key_BhNd = view.unrotated_keys()
        _, kv_heads, _, width = key_BhNd.shape
        sketch_hdk = gaussian_sketch(kv_heads, width, self.sketch, self.seed * 1_000 + view.layer)
        sketch_hdk = sketch_hdk.to(key_BhNd.device, non_blocking=True)
        attention_BhN, leverage_BhN = (torch.zeros_like(key_BhNd[..., 0]) for _ in range(2))
        for sample, rows_n in enumerate(view.places(self._inner)):  # chunks and means are those of its own entries
            if not len(rows_n):
                continue
            own_hnd = key_BhNd[sample].index_select(1, rows_n)
            leverage_BhN[sample][:, rows_n] = standardised(leverage_scores(own_hnd, sketch_hdk))
            attention_BhN[sample][:, rows_n] = standardised(self._attention(view, sample, rows_n))
        found = Scores(attention_BhN, view.entries_BN & ~self._inner(view.regions_BN), notes={"leverage": leverage_BhN})
        return found if self.blending is None else _blended(found, self.blending)

    def _inner(self, regions_BN: Tensor) -> Tensor:
        entries_BN = regions_BN != Region.PADDING
        place_BN = entries_BN.cumsum(-1)
        return entries_BN & (place_BN > self.sinks) & (place_BN <= place_BN[:, -1:] - self.last)

    def at_budget(self, scores: Scores, competes_BN: Tensor, count_Bh: Tensor) -> Scores:
        if self.blending is not None:
            return scores
        count_B = count_Bh.float() if count_Bh.dim() == 1 else count_Bh.float().mean(-1)
        return _blended(scores, (1 - count_B / competes_BN.sum(-1).clamp(min=1)).clamp(min=0)[:, None, None])

    def _attention(self, view: View, sample: int, rows_n: Tensor) -> Tensor:
        states = view.query_BHNd, view.key_BhNd, view.value_BhNd
        query_Hnd, key_hnd, value_hnd = (each[sample].index_select(1, rows_n).float() for each in states)
        sums_Hn = chunk_attention_sums(query_Hnd, key_hnd, self.chunk, self.masked)
        scores_hn = over_groups(sums_Hn[None], len(key_hnd))[0] * value_hnd.norm(dim=-1)
        return F.avg_pool1d(scores_hn[None], NEIGHBOURS, stride=1, padding=NEIGHBOURS // 2)[0]


def chunk_attention_sums(query_Hnd: Tensor, key_hnd: Tensor, chunk: int, masked: bool) -> Tensor:
    """Sum the attention each key receives from its chunk's rows, both ways, [H, n]; not ``masked``: zeros fill up."""
    heads, length, width = query_Hnd.shape
    parts = []
    for start in range(0, length, chunk):
        query_HCd, key_hCd = query_Hnd[:, start : start + chunk], key_hnd[:, start : start + chunk]
        rows = key_hCd.shape[1]
        if not masked:
            query_HCd, key_hCd = (F.pad(each, (0, 0, 0, chunk - rows)) for each in (query_HCd, key_hCd))
        grouped = query_HCd.reshape(len(key_hCd), -1, width)  # the query heads of a key head, row after row
        probability = (grouped @ key_hCd.transpose(-1, -2)).softmax(-1)
        parts.append(probability.view(heads, -1, key_hCd.shape[1]).sum(1)[:, :rows])
    return torch.cat(parts, 1)


def _blended(scores: Scores, factor: Tensor | float) -> Scores:
    return replace(scores, scores_BhN=scores.scores_BhN + factor * scores.notes["leverage"])
