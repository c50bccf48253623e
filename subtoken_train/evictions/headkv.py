"""HeadKV and SparseMM: a budget for every head by its calibrated score.

Legend: B batch, N cached rows of the prompt, R rows while tokens are decoded, c key heads of a row, h key-value heads,
L layers, T heads of all layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from subtoken_train.calibrations import CalibratedNumbers, check_table, check_table_shape, table_words
from subtoken_train.evictions.budgets import competing_counts, divide_budget, protected_counts
from subtoken_train.evictions.observers import Pooling, kernel_setting, window_setting
from subtoken_train.evictions.snapkv import PoolPer, RowReduction, SnapKV
from subtoken_train.view.method import setting
from subtoken_train.view.scores import Candidates, Scale, Scores
from subtoken_train.view.view import View


@dataclass(frozen=True)
class HeadScores(CalibratedNumbers):
    """Scores of heads, [L, h], 0 or more and not all 0; their ratios count, ``calibrate`` writes a mean of 1."""

    score: list[list[float]]

    def __post_init__(self) -> None:
        check_table("score", self.score, 0, 1e6)
        if not any(map(any, self.score)):
            raise ValueError("score is 0 for all heads; one of them must be more")

    def check_shape(self, num_layers: int, num_kv_heads: int, head_dim: int) -> None:
        check_table_shape("score", self.score, num_layers, num_kv_heads)

    def words(self) -> str:
        return table_words("score of every head, a line per layer", self.score)


@dataclass(frozen=True)
class HeadKV(SnapKV):
    """HeadKV (Fu et al., 2024): heads that look at what an answer needs keep more entries; SnapKV chooses which.

    Source: "Not All Heads Matter: A Head-Level KV Cache Compression Method with Integrated Retrieval and Reasoning"
    (2410.19258) and its code (FYYFU/HeadKV @0862a09). How much a head looks at needles is found once for a backbone
    (``subtoken-train calibrate headkv``). Every head keeps its window; of the rest of the budget the share ``floor`` is
    divided equally, the remainder by the heads' scores. Entries are chosen as SnapKV does, with a window of 32 rows and
    the largest of 7 neighbours. ``ada(headkv)`` divides a layer's sum by the prompt's own scores instead.

    The release keeps a set per query head; here a key-value head has the sum of its query heads' scores and the mean of
    their attention. Its ``floor`` is 1 - 1 / beta, with beta chosen per task; it rounds heads one by one and loses what
    they cannot take, where the budget is exact here. While tokens are decoded (``eviction_every``) heads keep their
    shares.

    Attributes:
        calibration: file of the heads' scores; needed.
        floor: share of the budget beside the windows that all heads divide equally, in [0, 1]; 1 leaves them equal.
    """

    name: ClassVar[str] = "headkv"
    across_layers: ClassVar[bool] = True
    absolute: ClassVar[Scale | None] = None
    calibrates: ClassVar[type[CalibratedNumbers]] = HeadScores
    heads_differ: ClassVar[bool] = True

    window: int | float = window_setting(32)
    kernel: int = kernel_setting(7)
    pooling: Pooling = "max"
    pool_per: PoolPer = "kv_head"
    rows: RowReduction = "mean"
    calibration: str | None = None
    floor: float = setting(0.1, 0, 1)

    def check_shape(self, num_layers: int, num_kv_heads: int, head_dim: int) -> None:
        self.read_numbers()

    def score(self, view: View) -> Scores:
        """SnapKV's scores, [B, h, N]; the heads' calibrated ones are noted, ``head`` [B, h] or [R, c]."""
        found = super().score(view)
        rows, heads = found.scores_BhN.shape[:2]
        own = torch.tensor(self.read_numbers().score[view.layer], device=found.scores_BhN.device)
        own_Rc = own.view(-1, heads)  # while tokens are decoded, a sample's heads are rows
        return replace(found, notes={"head": own_Rc.repeat(rows // len(own_Rc), 1)})

    def counts(self, scores: list[Scores], candidates: Candidates) -> Tensor:
        head_LRc = torch.stack([layer.notes["head"] for layer in scores])
        layers, rows, heads = head_LRc.shape
        shape = layers, rows // candidates.heads, candidates.heads * heads

        def of_samples(each_LRc: Tensor) -> Tensor:
            return each_LRc.cpu().reshape(shape).transpose(1, 2).flatten(0, 1)

        of_rows = candidates.budget_LB, protected_counts(scores, candidates), competing_counts(candidates)
        budget_TB, window_TB, most_TB = (of_samples(each[..., None].expand(head_LRc.shape)) for each in of_rows)
        count_TB = head_budgets(of_samples(head_LRc), self.floor, budget_TB, window_TB, most_TB)
        count_LRc = count_TB.view(layers, shape[2], shape[1]).transpose(1, 2).reshape(head_LRc.shape)
        return count_LRc.to(candidates.budget_LB.device)


def head_budgets(score_TB: Tensor, floor: float, budget_TB: Tensor, window_TB: Tensor, most_TB: Tensor) -> Tensor:
    """Entries of every head whose sum is the budgets', int64 [T, B], on the CPU.

    Of what the windows leave, the share ``floor`` is divided as the budgets are. A head keeps one entry at least; what
    another cannot take is divided by claims.
    """
    share_TB = score_TB.double() / score_TB.double().sum(0).clamp(min=1e-300)
    window_TB = torch.minimum(window_TB, budget_TB)
    left_TB = budget_TB - window_TB
    claim_TB = floor * left_TB + (1 - floor) * share_TB * left_TB.sum(0)
    return window_TB + divide_budget(claim_TB, left_TB.sum(0), (1 - window_TB).clamp(min=0), most_TB - window_TB)


@dataclass(frozen=True)
class SparseMM(HeadKV):
    """SparseMM (Wang et al., 2025): heads that look at what an answer tells of a picture keep more entries.

    Source: "SparseMM: Head Sparsity Emerges from Visual Concept Responses in MLLMs" (2506.05344) and its code
    (CR400AF-A/SparseMM @f52655b). Windows, an equal ``floor`` of what they leave (its ``ratio``), and the rest by
    scores of visual heads, which ``subtoken-train calibrate sparsemm`` finds once for a backbone. A head's entries are
    chosen by the last 32 rows, their mean over a group and over 5 neighbours. As released it is of the whole prompt:
    ``scope: all`` here. The release rounds heads one by one; here the budget is exact. Its scores were found on pages
    of words and their boxes, here on digit scenes.
    """

    name: ClassVar[str] = "sparsemm"

    kernel: int = kernel_setting(5)
    pooling: Pooling = "avg"
