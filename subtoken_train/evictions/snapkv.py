"""Methods by the last rows of a prompt: SnapKV, PyramidKV and CAKE, HeadKV and SparseMM, R-KV.

Legend: B batch, N cached rows of the prompt, H query heads, h key-value heads, W rows of the window, L layers; while
tokens are decoded R rows, c key heads of a row; T heads of all layers, n rows of a block.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from subtoken_train.calibrations import CalibratedNumbers, NumberTable, check_table
from subtoken_train.evictions import observers
from subtoken_train.evictions.base import Eviction, fitting
from subtoken_train.evictions.budgets import claims, competing_counts, divide_budget, protected_counts
from subtoken_train.functional.gather import take_rows
from subtoken_train.view.method import by_settings, setting
from subtoken_train.view.scores import Candidates, Scale, Scores
from subtoken_train.view.view import Need, Online, View

PoolPer = Literal["query_head", "kv_head"]
RowReduction = Literal["sum", "mean"]


class Windowed(Eviction):
    """A method that reads the last ``window`` rows: in chunks, and while decoding, where that is a number."""

    needs: ClassVar[frozenset[Need]] = frozenset({"rows"})
    window: int | float

    online = by_settings(lambda self: Online(rows=self.window if isinstance(self.window, int) else None))
    observing_rows = by_settings(lambda self: self.window if isinstance(self.window, int) else None)


@dataclass(frozen=True)
class SnapKV(Windowed):
    """SnapKV (Li et al., 2024): the last rows of the prompt say which entries matter, neighbours together.

    Source: Listing 1 of "SnapKV: LLM Knows What You are Looking for Before Generation" and its code: attention of the
    last ``window`` rows, summed over them, smoothed over neighbouring entries; the window itself stays. What
    re-implementations do otherwise is a setting each; the defaults are those of the released class. Every key-value
    head has one set, where the release repeats keys for all query heads. Where only the context competes, what follows
    it observes and costs no budget; else the window is inside the budget, and must be shorter to leave a choice.

    Attributes:
        window: last entries of the prompt that observe and always stay: a whole number, or a share of the layer's
            budget between 0 and 1, rounded down, 1 at least.
        kernel: entries that are pooled together, odd.
        pooling: ``avg`` (0 beyond an edge) or ``max``.
        pool_per: pool the scores of every ``query_head`` and then reduce a group, or a ``kv_head``'s reduced scores.
        rows: ``sum`` or ``mean`` over the window's rows; a threshold needs ``mean``, and so does ``critical``.
        group: over the query heads of a key-value head, ``mean`` or ``max``.
    """

    name: ClassVar[str] = "snapkv"

    window: int | float = observers.window_setting(64)
    kernel: int = observers.kernel_setting(5)
    pooling: observers.Pooling = "avg"
    pool_per: PoolPer = "query_head"
    rows: RowReduction = "sum"
    group: observers.GroupReduction = "mean"

    absolute = by_settings(
        lambda self: Scale(log=True, high=0.0) if self.rows == "mean" and isinstance(self.window, int) else None
    )

    def score(self, view: View) -> Scores:
        window_BN, index_BW = observers.window_rows(view, self.window)
        scores = view.rows(index_BW).sum(2)
        if self.rows == "mean":
            scores = scores / (index_BW >= 0).sum(-1).clamp(min=1)[:, None, None]
        kv_heads, before_BN = view.key_BhNd.shape[1], view.entries_BN & ~window_BN
        how = before_BN, self.kernel, self.pooling
        if self.pool_per == "query_head":
            scores = observers.over_groups(observers.neighbours_pooled(scores, *how), kv_heads, self.group)
        else:
            scores = observers.neighbours_pooled(observers.over_groups(scores, kv_heads, self.group), *how)
        return Scores(scores, window_BN)


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """PyramidKV (Cai et al., 2024): SnapKV's scores, with more entries in lower layers and fewer in higher ones.

    Source: section 3.2 of "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling" and its
    code: without the window every layer has ``base`` entries on average; the last layer gets ``base // beta``, the
    first what makes their mean ``base``, those between lie on a line, flatter where a layer has fewer entries.

    Attributes:
        beta: how steep the pyramid is: the last layer keeps ``base // beta`` entries beside the window; 1 is flat.
        budgets: ``exact``: the original's line, all layers together keep exactly the budget. ``original``: the line's
            step is rounded down as released, so that up to half as much again stays. ``kvpress``: the line runs through
            whole budgets, the window inside; off by what rounding leaves.
    """

    name: ClassVar[str] = "pyramidkv"
    across_layers: ClassVar[bool] = True
    online: ClassVar[Online | None] = None
    absolute: ClassVar[Scale | None] = None

    beta: int = setting(20, 1)
    budgets: Literal["exact", "original", "kvpress"] = "exact"

    def counts(self, scores: list[Scores], candidates: Candidates) -> Tensor:
        window_LB = protected_counts(scores, candidates)
        # on the CPU: few numbers, float64, and whole-number division
        budget_LB, entries_LB = candidates.budget_LB.cpu(), competing_counts(candidates).cpu()
        return PYRAMIDS[self.budgets](budget_LB, entries_LB, window_LB.cpu(), self.beta).to(window_LB.device)


def exact_pyramid(budget_LB: Tensor, entries_LB: Tensor, window_LB: Tensor, beta: int) -> Tensor:
    """Return the original's line, rounded so that a sample's layers keep exactly their budgets' sum.

    Layer l moves from its own budget by (L - 1 - 2 l) / (L - 1) of the largest shift that every layer has room for, so
    layers may differ in budget and entries; every layer keeps 1 at least.
    """
    base_LB = budget_LB - window_LB
    least_LB = (window_LB + base_LB // beta).clamp(min=1)
    layer_L1 = torch.arange(len(budget_LB), dtype=torch.float64)[:, None]
    slope_L1 = (len(budget_LB) - 1 - 2 * layer_L1) / max(len(budget_LB) - 1, 1)
    free_LB = torch.where(slope_L1 > 0, entries_LB - budget_LB, budget_LB - least_LB)
    shift_B = torch.where(slope_L1 == 0, torch.inf, free_LB / slope_L1.abs()).amin(0).clamp(min=0)
    line_LB = budget_LB + slope_L1 * shift_B.masked_fill((entries_LB < 2 * base_LB).any(0) | shift_B.isinf(), 0)
    return divide_budget(line_LB, budget_LB.sum(0), torch.ones_like(budget_LB), entries_LB)


def original_pyramid(budget_LB: Tensor, entries_LB: Tensor, window_LB: Tensor, beta: int) -> Tensor:
    """Return the released code's counts; where it fails, at budgets within the window, the budgets themselves."""
    layers = len(budget_LB)
    base_LB, before_LB = budget_LB - window_LB, entries_LB - window_LB
    most_LB = torch.minimum(2 * base_LB - base_LB // beta, before_LB)
    step_LB = 2 * (most_LB - base_LB) // max(layers - 1, 1)
    count_LB = most_LB - torch.arange(layers)[:, None] * step_LB + window_LB
    return budget_LB if layers == 1 else torch.where((base_LB <= 0) | (entries_LB < 2 * base_LB), budget_LB, count_LB)


def kvpress_pyramid(budget_LB: Tensor, entries_LB: Tensor, window_LB: Tensor, beta: int) -> Tensor:
    """Return kvpress' counts: the line holds the window, rounds half to even, and is flat where it does not fit."""
    layers, budget_LB = len(budget_LB), budget_LB.double()
    most_LB, least_LB = 2 * budget_LB - budget_LB / beta, budget_LB / beta
    capped_LB = most_LB >= entries_LB - window_LB
    most_LB = torch.where(capped_LB, entries_LB - window_LB, most_LB)
    least_LB = torch.where(capped_LB, 2 * budget_LB - most_LB, least_LB)
    line_LB = most_LB - torch.arange(layers)[:, None] * ((most_LB - least_LB) / max(layers - 1, 1))
    fits_LB = (entries_LB >= most_LB) & (most_LB >= least_LB) & (least_LB >= window_LB)
    return torch.where(fits_LB, line_LB if layers > 1 else budget_LB, budget_LB).round().long()


PYRAMIDS = {"exact": exact_pyramid, "original": original_pyramid, "kvpress": kvpress_pyramid}


LEAST = 1e-10  # inside the entropy's logarithm, as released
MOST = 1e6


@dataclass(frozen=True)
class CAKE(Windowed):
    """CAKE (Qin et al., 2025): layers whose last rows attend widely and variably keep more.

    Source: arXiv 2503.12491 and its code (antgroup/cakekv @c4675ce). The last ``window`` rows, which always stay, look
    at the entries before them. A layer's preference is the entropy of their attention to the power 1 / ``tau1``, times
    its variance from row to row to the power 1 / ``tau2``, both summed over heads; what the windows leave of the budget
    is divided by it. An entry's score is its mean attention plus ``gamma`` times the variance, averaged over its
    neighbours, then over a group's query heads.

    Remainders go by preference, where the release hands them out alike; no layer is cut before all have run, where its
    cascade bounds the peak of a prompt's pass and ends at the same shares. Its taus were tuned per model and budget
    (0.4 to 2.3). While tokens are decoded (``eviction_every``) layers keep the prompt's preferences.

    Attributes:
        window: last entries of the prompt that observe and always stay: a whole number, or a share of the budget.
        kernel: entries whose scores are averaged together, odd.
        gamma: weight of the variance in an entry's score.
        tau1: the larger, the less the entropy counts in a layer's preference.
        tau2: the larger, the less the variance counts.
    """

    name: ClassVar[str] = "cake"
    across_layers: ClassVar[bool] = True

    window: int | float = observers.window_setting(32)
    kernel: int = observers.kernel_setting(5)
    gamma: float = setting(200.0, 0, MOST)
    tau1: float = setting(1.0, 1 / MOST, MOST)
    tau2: float = setting(1.0, 1 / MOST, MOST)

    def score(self, view: View) -> Scores:
        window_BN, index_BW = observers.window_rows(view, self.window)
        rows_BHWN = view.rows(index_BW)
        there_BW = rows_BHWN[:, 0].sum(-1) > 0  # while tokens are decoded, some queries of a window may be gone
        before_BN = view.entries_BN & ~window_BN
        rows_BHWN = rows_BHWN.masked_fill(~before_BN[:, None, None], 0.0)
        count_B11 = there_BW.sum(-1)[:, None, None]
        mean_BHN = rows_BHWN.sum(2) / count_B11.clamp(min=1)
        away_BHWN = (rows_BHWN - mean_BHN[:, :, None]) * there_BW[:, None, :, None]
        variance_BHN = away_BHWN.square().sum(2) / (count_B11 - 1).clamp(min=1)
        pooled_BHN = observers.neighbours_pooled(mean_BHN + self.gamma * variance_BHN, before_BN, self.kernel, "avg")
        entropy_B = -(rows_BHWN * (rows_BHWN + LEAST).log()).sum((1, 2, 3))
        tiny = torch.finfo(torch.float32).tiny
        preference_B = entropy_B.clamp(min=tiny).log() / self.tau1
        preference_B = preference_B + variance_BHN.sum((1, 2)).clamp(min=tiny).log() / self.tau2
        if view.carried is not None:  # the prompt's, which all entries of the last look have: the oldest is one
            preference_B = view.carried.gather(2, view.entries_BN.int().argmax(-1)[:, None, None])[:, 0, 0]
        kv_heads = view.key_BhNd.shape[1]
        carried_BhN = preference_B[:, None, None].expand(-1, kv_heads, view.entries_BN.shape[1])
        return Scores(observers.over_groups(pooled_BHN, kv_heads), window_BN, preference_B, carried=carried_BhN)

    def counts(self, scores: list[Scores], candidates: Candidates) -> Tensor:
        window_LB = torch.minimum(protected_counts(scores, candidates), candidates.budget_LB)
        left_B = (candidates.budget_LB - window_LB).sum(0)
        free_LB = competing_counts(candidates) - window_LB
        return window_LB + divide_budget(claims(scores).softmax(0), left_B, (1 - window_LB).clamp(min=0), free_LB)


@dataclass(frozen=True)
class HeadScores(NumberTable):
    """Scores of heads, [L, h], 0 or more and not all 0; their ratios count, ``calibrate`` writes a mean of 1."""

    table: ClassVar[str] = "score"
    says: ClassVar[str] = "score of every head, a line per layer"

    score: list[list[float]]

    def __post_init__(self) -> None:
        check_table("score", self.score, 0, 1e6)
        if not any(map(any, self.score)):
            raise ValueError("score is 0 for all heads; one of them must be more")


@dataclass(frozen=True)
class HeadKV(SnapKV):
    """HeadKV (Fu et al., 2024): heads that attend to what answers need keep more entries; SnapKV chooses which.

    Source: arXiv 2410.19258 and its code (FYYFU/HeadKV @0862a09). How much a head looks at needles is found once for a
    backbone (``subtoken-train calibrate headkv``). Every head keeps its window; of the rest of the budget the share
    ``floor`` is divided equally, the remainder by the heads' scores. ``ada(headkv)`` divides a layer's sum by the
    prompt's own scores instead.

    The release keeps a set per query head; here a key-value head has the sum of its query heads' scores and the mean of
    their attention. Its ``floor`` is 1 - 1 / beta, with beta chosen per task, and its heads are rounded one by one.

    Attributes:
        calibration: file of the heads' scores; needed.
        floor: share of the budget beside the windows that all heads divide equally, in [0, 1]; 1 leaves them equal.
    """

    name: ClassVar[str] = "headkv"
    across_layers: ClassVar[bool] = True
    absolute: ClassVar[Scale | None] = None
    calibrates: ClassVar[type[CalibratedNumbers]] = HeadScores
    heads_differ: ClassVar[bool] = True
    needs_file: ClassVar[bool] = True

    window: int | float = observers.window_setting(32)
    kernel: int = observers.kernel_setting(7)
    pooling: observers.Pooling = "max"
    pool_per: PoolPer = "kv_head"
    rows: RowReduction = "mean"
    calibration: str | None = None
    floor: float = setting(0.1, 0, 1)

    def score(self, view: View) -> Scores:
        found = super().score(view)
        rows, heads = found.scores_BhN.shape[:2]
        own = self.numbers_of(view.layer, found.scores_BhN.device, "score")
        own_Rc = own.view(-1, heads)  # while tokens are decoded, a sample's heads are rows
        return replace(found, notes={"head": own_Rc.repeat(rows // len(own_Rc), 1)})

    def counts(self, scores: list[Scores], candidates: Candidates) -> Tensor:
        head_LRc = torch.stack([layer.notes["head"] for layer in scores])
        shape = len(head_LRc), -1, candidates.heads * head_LRc.shape[2]  # a sample's heads together
        of_rows = candidates.budget_LB, protected_counts(scores, candidates), competing_counts(candidates)
        score_TB, *of_heads = (
            each.cpu().reshape(shape).mT.flatten(0, 1)
            for each in (head_LRc, *(each[..., None].expand(head_LRc.shape) for each in of_rows))
        )
        count_TB = head_budgets(score_TB, self.floor, *of_heads)
        return count_TB.view(len(head_LRc), shape[2], -1).mT.reshape(head_LRc.shape).to(candidates.budget_LB.device)


def head_budgets(score_TB: Tensor, floor: float, budget_TB: Tensor, window_TB: Tensor, most_TB: Tensor) -> Tensor:
    """Divide the budgets among the heads: entries of each, int64 [T, B], on the CPU, of the same sum."""
    share_TB = score_TB.double() / score_TB.double().sum(0).clamp(min=1e-300)
    window_TB = torch.minimum(window_TB, budget_TB)
    left_TB = budget_TB - window_TB
    claim_TB = floor * left_TB + (1 - floor) * share_TB * left_TB.sum(0)
    return window_TB + divide_budget(claim_TB, left_TB.sum(0), (1 - window_TB).clamp(min=0), most_TB - window_TB)


@dataclass(frozen=True)
class SparseMM(HeadKV):
    """SparseMM (Wang et al., 2025): heads that attend to what answers describe keep more entries.

    Source: arXiv 2506.05344 and its code (CR400AF-A/SparseMM @f52655b). Windows, an equal ``floor`` of what they leave
    (its ``ratio``), and the rest by scores of visual heads, which ``subtoken-train calibrate sparsemm`` finds once for
    a backbone, on digit scenes (the release: on pages of words). As released: ``scope: all``.
    """

    name: ClassVar[str] = "sparsemm"

    kernel: int = observers.kernel_setting(5)
    pooling: observers.Pooling = "avg"


BLOCK = 256  # rows of similarities at once


@dataclass(frozen=True)
class RKV(Windowed):
    """R-KV (Cai et al., 2025): attention of the last rows, less how much an entry's key repeats others.

    Source: arXiv 2505.24133 and its code (Zefan-Cai/R-KV). Importance: logits of the window's rows, the largest of a
    group, softmax over the entries before the window, mean over rows, maximum of neighbours. Redundancy: mean cosine
    similarity of an entry's key to all keys, softmax over the entries; of the entries that are more alike to a key than
    ``alike``, the latest does not count (the release leaves out the first one where there is none). The score is
    ``importance`` times the first less the rest of 1 times the second.

    Attributes:
        window: last entries, which observe and stay, inside the budget; a whole number, or a share of the budget.
        kernel: neighbours whose largest importance counts, odd.
        importance: the paper's lambda.
        alike: similarity from which an entry repeats another.
    """

    name: ClassVar[str] = "rkv"
    needs: ClassVar[frozenset[Need]] = frozenset()

    window: int | float = observers.window_setting(8)
    kernel: int = observers.kernel_setting(7)
    importance: float = setting(0.1, 0, 1)
    alike: float = setting(0.5, -1, 1)

    def score(self, view: View) -> Scores:
        window_BN, index_BW = observers.window_rows(view, self.window)
        before_BN = view.entries_BN & ~window_BN
        paid_BhN = window_attention(view, index_BW, before_BN)
        important_BhN = observers.neighbours_pooled(paid_BhN, before_BN, self.kernel, "max")
        repeated_BhN = redundancy(view.key_BhNd, view.entries_BN, self.alike)
        return Scores(self.importance * important_BhN - (1 - self.importance) * repeated_BhN, window_BN)

    def at_budget(self, scores: Scores, competes_BN: Tensor, count_Bh: Tensor) -> Scores:
        return fitting(self.window, scores, competes_BN, count_Bh)


def window_attention(view: View, index_BW: Tensor, before_BN: Tensor) -> Tensor:
    """Return attention of rows over what is before them, by each group's largest logits, row mean, [B, h, N]."""
    batch, kv_heads, length, width = view.key_BhNd.shape
    place_BW = index_BW - (length - view.query_BHNd.shape[2])
    seen_BW = (index_BW >= 0) & (place_BW >= 0)
    query_BHWd = take_rows(view.query_BHNd.transpose(1, 2), place_BW.clamp(min=0)).transpose(1, 2).float()
    grouped = query_BHWd.reshape(batch, kv_heads, -1, width)  # the rows of a group's query heads, head after head
    logits = grouped @ view.key_BhNd.float().transpose(-1, -2) * view.scale
    logits = logits.view(batch, kv_heads, -1, index_BW.shape[1], length)
    least = torch.finfo(torch.float32).min
    paid_BhWN = logits.amax(2).masked_fill(~before_BN[:, None, None], least).softmax(-1) * seen_BW[:, None, :, None]
    return (paid_BhWN.sum(2) / seen_BW.sum(-1).clamp(min=1)[:, None, None]).masked_fill(~before_BN[:, None], 0.0)


def redundancy(key_BhNd: Tensor, entries_BN: Tensor, alike: float) -> Tensor:
    """Return the softmax over entries of a key's mean similarity to all others, [B, h, N] in fp32."""
    key_BhNd = key_BhNd.float() * entries_BN[:, None, :, None]
    key_BhNd = key_BhNd / (key_BhNd.norm(dim=-1, keepdim=True) + 1e-8)
    total_BhN, place_N = torch.zeros_like(key_BhNd[..., 0]), torch.arange(key_BhNd.shape[2], device=key_BhNd.device)
    for rows_n in torch.split(place_N, BLOCK):
        similar_BhnN = key_BhNd[:, :, rows_n] @ key_BhNd.transpose(-1, -2)
        similar_BhnN.masked_fill_(rows_n[:, None] == place_N, 0.0)
        latest_Bhn1 = torch.where(similar_BhnN > alike, place_N, -1).amax(-1, keepdim=True)
        total_BhN += similar_BhnN.masked_fill_(place_N == latest_Bhn1, 0.0).sum(2)
    mean_BhN = total_BhN / entries_BN.sum(-1).clamp(min=1)[:, None, None]
    return mean_BhN.masked_fill(~entries_BN[:, None], torch.finfo(torch.float32).min).softmax(-1)
