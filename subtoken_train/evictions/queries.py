"""Methods by who asks: TOVA, Finch, Quest, Q-Filters, ExpectedAttention, CapKV and TriAttention.

Legend: B batch, N cached rows of the prompt, H query heads, h key-value heads, G = H / h, d head width, r of its
channels that are turned, L layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import inf
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from subtoken_train.calibrations import CalibratedNumbers, check_table, table_words
from subtoken_train.errors import refuse
from subtoken_train.evictions.base import Eviction, fitting, layer_count, protect_last
from subtoken_train.evictions.budgets import competing_counts
from subtoken_train.evictions.observers import over_groups, share_of, task_rows, window_setting
from subtoken_train.functional.gather import last_marked
from subtoken_train.functional.rotary import Rotation
from subtoken_train.types import Region
from subtoken_train.view.method import setting
from subtoken_train.view.scores import Candidates, Scale, Scores
from subtoken_train.view.view import Need, Online, View


@dataclass(frozen=True)
class TOVA(Eviction):
    """TOVA (Oren et al., 2024): the entries that the prompt's last row attends to, one set for all heads of a layer.

    Source: "Transformers are Multi-State RNNs" (2401.06104) and its code (``tova_cache.py`` @9c7d09b): attention of the
    last row, mean over all query heads. The paper evicts at every step, here after ``eviction_every`` tokens.

    Attributes:
        protect_last: the prompt's last entry always stays, inside the budget (kvpress).
    """

    name: ClassVar[str] = "tova"
    absolute: ClassVar[Scale] = Scale(log=True, high=0.0)
    online: ClassVar[Online] = Online(rows=1)
    needs: ClassVar[frozenset[Need]] = frozenset({"rows"})
    heads_share: ClassVar[bool] = True

    protect_last: bool = False

    def score(self, view: View) -> Scores:
        scores_B1N = view.rows(view.last_rows(1))[:, :, 0].mean(1, keepdim=True)
        last_BN = last_marked(view.entries_BN, 1) if self.protect_last else torch.zeros_like(view.entries_BN)
        return Scores(scores_B1N, last_BN)


@dataclass(frozen=True)
class Finch(Eviction):
    """Finch (Corallo & Papotti, 2024): entries that the question attends to.

    Source: arXiv 2408.00167, its code and kvpress 0.5.4. The score is the attention of the question's rows, each times
    the number of entries up to it, mean over rows and a group's query heads. The question's entries stay; prompts
    without one, and contexts compressed before their question, are refused. A set per key-value head, as in kvpress
    (one for all heads in the paper). Both turn what stays to closed-up positions: ``rerotate: true`` here.
    """

    name: ClassVar[str] = "finch"
    needs: ClassVar[frozenset[Need]] = frozenset({"blocks"})
    needs_question: ClassVar[bool] = True
    left: ClassVar[Mapping[str, Any]] = {"normalise": True}

    def score(self, view: View) -> Scores:
        asking_BN = task_rows(view.regions_BN)
        sums_BHN = view.received(asking_BN, weight_BN=view.entries_BN.cumsum(-1).float(), among=task_rows)
        sums_BHN = sums_BHN / asking_BN.sum(-1).clamp(min=1)[:, None, None]
        return Scores(over_groups(sums_BHN, view.key_BhNd.shape[1]).masked_fill(asking_BN[:, None], 0.0), asking_BN)


@dataclass(frozen=True)
class QuestSteps(Eviction):
    """Quest as published: all entries stay in memory, and each step reads the pages that its query asks for.

    Source: "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference" (Tang et al., 2024), sections
    3.2-3.4, and its code. The smallest and largest value of each key channel in a page bound the logits of its entries;
    the pages with the largest bounds are read.

    **No bytes are freed**: ``eviction_keep`` is the share (or number) of the entries in scope that a step reads, and
    the page index comes on top of the full cache. The reducer ``quest`` chooses pages once and drops the others. Pages
    are chosen per key-value head, by the mean of its query heads' bounds. Pages that hold an entry out of scope, the
    last page and what was generated since are always read. It does not go with value groups.

    Attributes:
        page_size: entries of a page.
        least_pages: pages that a step reads, whatever the budget.
        dense_layers: first layers that read everything.
    """

    name: ClassVar[str] = "quest_steps"
    heads_share: ClassVar[bool] = True
    reads: ClassVar[bool] = True

    page_size: int = setting(16, 1)
    least_pages: int = setting(3, 1)
    dense_layers: int = setting(2)

    def score(self, view: View) -> Scores:
        return Scores(torch.zeros_like(view.entries_BN[:, None], dtype=torch.float32), view.entries_BN)

    def counts(self, scores: list[Scores], candidates: Candidates) -> Tensor:
        return competing_counts(candidates)

    def keep(self, scores: list[Scores], candidates: Candidates) -> list[Tensor]:
        return [(regions_BN != Region.PADDING)[:, None] for regions_BN in candidates.regions_LBN]

    def pages(self, layer: int) -> tuple[int, int] | None:
        return None if layer < self.dense_layers else (self.page_size, self.least_pages)


class HeadVectors(CalibratedNumbers):
    """Vectors of every head: each field holds a table for every layer, [heads, d], all of one shape."""

    of_queries: ClassVar[bool] = False  # of query heads; else of key-value heads

    def __post_init__(self) -> None:
        tables = {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]
        for name, table_LHd in tables.items():
            for layer, table_Hd in enumerate(table_LHd):
                check_table(f"{name}[{layer}]", table_Hd, 0 if name == "length" else -1e6, 1e6)
        shapes = {(len(own), *{(len(table), len(table[0])) for table in own}) for own in tables.values()}
        if len(shapes) != 1 or len(shapes.pop()) != 2:
            raise ValueError(f"{' and '.join(tables)} must hold a table for every layer, all of one shape")

    def check_shape(self, num_layers: int, num_kv_heads: int, head_dim: int) -> None:
        name = fields(self)[0].name  # type: ignore[arg-type]
        found = torch.tensor(getattr(self, name)).shape
        heads = found[1] if self.of_queries and found[1] % num_kv_heads == 0 else num_kv_heads
        words = "{} has {} layers of {} heads of width {}, and the backbone {} of {} of {}"
        wanted = num_layers, heads, head_dim
        refuse((found != wanted, words.format(name, *found, *wanted)))


@dataclass(frozen=True)
class HeadDirections(HeadVectors):
    """Direction of the queries of every head: per layer and key-value head, [L, h, d]."""

    direction: list[list[list[float]]]

    def words(self) -> str:
        lengths = torch.tensor(self.direction).norm(dim=-1).tolist()
        return table_words("length of every head's direction, a line per layer", lengths)


@dataclass(frozen=True)
class QFilter(Eviction):
    """Q-Filters (Godey et al., 2025): entries whose keys point where their head's queries point.

    Source: arXiv 2503.02812, section 3, and its code. The direction u of a head is the first right singular vector of
    its queries, not centred, with the sign of their mean projection; that of a key-value head is the mean over its
    query heads. An entry scores the projection of its rotated key on u. Nothing is protected.

    Attributes:
        calibration: file of directions found offline, as in the paper (``subtoken-train calibrate q_filter``); None:
            those of the prompt's own queries.
    """

    name: ClassVar[str] = "q_filter"
    calibrates: ClassVar[type[CalibratedNumbers]] = HeadDirections

    calibration: str | None = None

    def score(self, view: View) -> Scores:
        key_BhNd = view.key_BhNd.float()
        if self.calibrated is None:
            gram_BHdd, sum_BHd = query_moments(view.query_BHNd, view.entries_BN)
            direction_Bhd = directions(gram_BHdd, sum_BHd, key_BhNd.shape[1]).to(key_BhNd)
        else:
            direction_Bhd = self.numbers_of(view.layer, key_BhNd.device, "direction").expand(len(key_BhNd), -1, -1)
        return Scores((key_BhNd * direction_Bhd[:, :, None]).sum(-1), torch.zeros_like(view.entries_BN))


def query_moments(query_BHNd: Tensor, rows_BN: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the marked rows' query products [B, H, d, d] and queries [B, H, d], fp64 on the CPU."""
    marked_BHNd = query_BHNd.double().cpu() * rows_BN[:, None, :, None].cpu()
    return marked_BHNd.transpose(-1, -2) @ marked_BHNd, marked_BHNd.sum(2)


def directions(gram_BHdd: Tensor, sum_BHd: Tensor, kv_heads: int) -> Tensor:
    """Return the directions of key-value heads, [B, h, d] in fp64, from ``query_moments``."""
    first_BHd = torch.linalg.eigh(gram_BHdd).eigenvectors[..., -1]  # eigenvalues rise
    signed_BHd = torch.where((first_BHd * sum_BHd).sum(-1, keepdim=True) < 0, -first_BHd, first_BHd)
    return signed_BHd.view(len(sum_BHd), kv_heads, -1, sum_BHd.shape[-1]).mean(2)


FURTHEST = 1 << 16  # positions that are averaged


@dataclass(frozen=True)
class ExpectedAttention(Eviction):
    """ExpectedAttention (Devoto et al., 2025): entries that future queries are expected to attend to.

    Source: arXiv 2510.00636, in the form of kvpress 0.5.4. Queries before their rotary embedding are taken to be
    normal, with the mean and the covariance of the prompt's own. Turned by the mean rotation of the next ``future``
    positions, they give an entry's expected exp(q.k) in closed form; its share among all entries, mean over a group,
    times the norm of its value, is the score.

    Attributes:
        future: positions after the prompt whose mean rotation the queries get.
        sinks: first entries of the prompt that always stay, inside the budget, and count in no statistic.
        covariance: of the queries, counts; otherwise their mean alone.
        value_norm: scores are multiplied by the norm of the value.
        epsilon: added to the expected attention before that.
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
        sinks_BN, counted_BN, mean_BHd, *covariance = future_queries(view, self.sinks, self.future, self.covariance)
        key_BhNd = view.key_BhNd.float()
        logits_BHN = grouped_products(mean_BHd[:, :, None], key_BhNd) * view.scale
        for covariance_BHdd in covariance:  # one product for the query heads that share a key
            every_BhdGd = torch.unflatten(covariance_BHdd, 1, (key_BhNd.shape[1], -1)).transpose(2, 3)
            seen_BhNGd = torch.unflatten(key_BhNd @ every_BhdGd.flatten(3), -1, (-1, key_BhNd.shape[-1]))
            logits_BHN += (seen_BhNGd @ key_BhNd[..., None])[..., 0].mT.flatten(1, 2) * (0.5 * view.scale**2)
        share_BHN = logits_BHN.masked_fill(~counted_BN[:, None], torch.finfo(torch.float32).min).softmax(-1)
        scores_BhN = over_groups(share_BHN, key_BhNd.shape[1])
        if self.value_norm:
            scores_BhN = (scores_BhN + self.epsilon) * view.value_norms()
        return Scores(scores_BhN.masked_fill(~counted_BN[:, None], 0.0), sinks_BN)


@dataclass(frozen=True)
class CapKV(Eviction):
    """CapKV (2026): entries whose values span what future queries read.

    Source: arXiv 2604.25975, in the form of kvpress (``cap_press.py``). An entry weighs w = exp(``tau`` times the
    cosine of its key and the mean future query, as in ``expected_attention``), less a head's largest; its score is the
    leverage w v A^-1 v of its value in the capacity A = I + sum w v v^T, mean over a group. No 1e-6 is added to w.

    Attributes:
        tau: how much likeness to the mean query counts.
        future: positions after the prompt whose mean rotation the queries get.
        sinks: first entries of the prompt that always stay, inside the budget, and count in no statistic.
    """

    name: ClassVar[str] = "capkv"
    needs: ClassVar[frozenset[Need]] = frozenset({"values"})

    tau: float = setting(5.0, 0, 1e3)
    future: int = setting(512, 1, FURTHEST)
    sinks: int = setting(4)

    def score(self, view: View) -> Scores:
        sinks_BN, counted_BN, mean_BHd = future_queries(view, self.sinks, self.future, covariance=False)
        unit_BhNd, value_Bh1Nd = F.normalize(view.key_BhNd.float(), dim=-1), view.value_BhNd.float()[:, :, None]
        alike_BHN = grouped_products(F.normalize(mean_BHd, dim=-1)[:, :, None], unit_BhNd)
        alike_BHN = alike_BHN.masked_fill(~counted_BN[:, None], -torch.inf)
        weight_BHN = (self.tau * (alike_BHN - alike_BHN.amax(-1, keepdim=True))).exp().nan_to_num(0)  # none is counted
        weight_BhGN = weight_BHN.view(*unit_BhNd.shape[:2], -1, unit_BhNd.shape[2])
        capacity_BhGdd = (value_Bh1Nd * weight_BhGN[..., None]).mT @ value_Bh1Nd
        capacity_BhGdd.diagonal(dim1=-2, dim2=-1).add_(1)
        factor_BhGdd = torch.linalg.cholesky_ex(capacity_BhGdd)[0]  # of numbers there is one
        half_BhGdN = torch.linalg.solve_triangular(factor_BhGdd, value_Bh1Nd.mT, upper=False)
        return Scores((weight_BhGN * half_BhGdN.square().sum(-2)).mean(2), sinks_BN)  # |L^-1 v|^2 is v^T A^-1 v


def future_queries(view: View, sinks: int, future: int, covariance: bool) -> tuple[Tensor, ...]:
    """Return sinks, other entries, their queries' mean [B, H, d] and covariance, turned by the next rotations' mean."""
    sinks_BN = view.entries_BN & (view.entries_BN.cumsum(-1) <= sinks)
    counted_BN = view.entries_BN & ~sinks_BN
    count_B11, others_B1N1 = counted_BN.sum(-1).clamp(min=1)[:, None, None], ~counted_BN[:, None, :, None]
    query_BHNd = view.unrotated_queries().masked_fill_(others_B1N1, 0.0)
    rotation = view.rotate(view.next_position + torch.arange(future, device=view.next_position.device)).mean()
    mean_BHd = query_BHNd.sum(2) / count_B11
    found = sinks_BN, counted_BN, rotation.turn(mean_BHd[:, :, None])[:, :, 0]
    if not covariance:
        return found
    query_BHNd.sub_(mean_BHd[:, :, None]).masked_fill_(others_B1N1, 0.0)
    return *found, rotation.turn(rotation.turn(query_BHNd.mT @ query_BHNd / count_B11[..., None]).mT).mT  # R C R^T


DISTANCES = 17  # from 1 to 65,536


@dataclass(frozen=True)
class QueryCentres(HeadVectors):
    """Mean of each query head's queries before rotation, [L, H, d], and the mean length of each channel's pair."""

    of_queries: ClassVar[bool] = True

    mean: list[list[list[float]]]
    length: list[list[list[float]]]

    def words(self) -> str:
        mean_LH, length_LH = (torch.tensor(each).norm(dim=-1) for each in (self.mean, self.length))
        share_LH = 2**0.5 * mean_LH / length_LH.clamp(min=1e-12)
        return table_words("concentration of every head's queries (1: all alike), a line per layer", share_LH.tolist())


def pair_lengths(vectors_BhNd: Tensor, rotation: Rotation) -> Tensor:
    """Return the length of the pair in which each channel turns, [B, h, N, d]; an unturned one pairs with itself."""
    quarter = replace(rotation, cos_BNr=torch.zeros_like(rotation.cos_BNr), sin_BNr=torch.ones_like(rotation.sin_BNr))
    return torch.hypot(vectors_BhNd.float(), quarter.turn(vectors_BhNd))


@dataclass(frozen=True)
class TriAttention(Eviction):
    """TriAttention (2026): entries that a head's mean query will attend to.

    Source: arXiv 2604.04921 and its code (WeianMao/triattention). Before their rotary embedding a head's queries lie
    around one centre, which ``subtoken-train calibrate triattention`` finds; the logit of an entry at a distance is
    then a sum of cosines, one per frequency. Its mean over the distances 1, 2, 4, ... after the next position, plus,
    per frequency, the key's length times what the queries' mean length is above their mean's, is the score. A query
    head's scores are standardised, a group's largest counts.

    Attributes:
        calibration: file of the mean queries; needed.
        window: last entries that always stay, inside the budget; a whole number, or a share of the budget.
    """

    name: ClassVar[str] = "triattention"
    online: ClassVar[Online] = Online(rows=0)
    calibrates: ClassVar[type[CalibratedNumbers]] = QueryCentres

    needs_file: ClassVar[bool] = True

    calibration: str | None = None
    window: int | float = window_setting(0.1)

    def score(self, view: View) -> Scores:
        key_BhNd, entries_B1N = view.key_BhNd.float(), view.entries_BN[:, None]
        rotation = view.rotate(view.next_position + (2 ** torch.arange(DISTANCES, device=key_BhNd.device))).mean()
        samples = len(key_BhNd) // view.heads

        def of_rows(name: str) -> Tensor:
            own_hHd = self.numbers_of(view.layer, key_BhNd.device, name).view(view.heads, -1, key_BhNd.shape[-1])
            return own_hHd.repeat(samples, 1, 1)[:, :, None]  # while tokens are decoded, a sample's heads are rows

        mean_BH1d, length_BH1d = of_rows("mean"), of_rows("length")
        spread_BH1d = (length_BH1d - pair_lengths(mean_BH1d, rotation)).clamp(min=0)
        spread_BH1d[..., rotation.cos_BNr.shape[-1] :].zero_()
        scores_BHN = grouped_products(rotation.turn(mean_BH1d), key_BhNd)
        scores_BHN += grouped_products(spread_BH1d, pair_lengths(key_BhNd, rotation)) / 2  # pairs stand there twice
        count_B11 = view.entries_BN.sum(-1).clamp(min=1)[:, None, None]
        centred_BHN = (scores_BHN - (scores_BHN * entries_B1N).sum(-1, keepdim=True) / count_B11) * entries_B1N
        deviation_BH1 = (centred_BHN.square().sum(-1, keepdim=True) / count_B11).sqrt().clamp(min=1e-6)
        scores_BhN = over_groups(centred_BHN / deviation_BH1, key_BhNd.shape[1], "max")
        return Scores(scores_BhN, torch.zeros_like(view.entries_BN), notes={"entries": view.entries_BN})

    def at_budget(self, scores: Scores, competes_BN: Tensor, count_Bh: Tensor) -> Scores:
        count_B, window = layer_count(count_Bh), self.window
        last_B = torch.full_like(count_B, window) if isinstance(window, int) else share_of(count_B, window)
        return fitting(window, protect_last(scores, scores.notes["entries"], last_B), competes_BN, count_Bh)


def grouped_products(query_BHnd: Tensor, key_BhNd: Tensor) -> Tensor:
    """Multiply one query per head (n = 1) with its key-value head's keys, [B, H, N]."""
    batch, heads, _, width = query_BHnd.shape
    return (query_BHnd.view(batch, key_BhNd.shape[1], -1, width) @ key_BhNd.transpose(-1, -2)).reshape(batch, heads, -1)
