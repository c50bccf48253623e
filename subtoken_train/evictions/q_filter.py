"""Q-Filters (Godey et al., 2025): keys that point where queries point stay, by one direction per head.

Source: "Q-Filters: Leveraging QK Geometry for Efficient KV Cache Compression" (arXiv 2503.02812), section 3, and its
code. The direction u of a head is the first right singular vector of its queries, not centred, with the sign of their
mean projection; that of a key-value head is the mean over its query heads. An entry scores the projection of its
rotated key on u. ``calibration`` names a file of directions that were found offline, as in the paper (``subtoken-train
calibrate q_filter``). Nothing is protected.

Legend: B batch, N cached rows of the prompt, H query heads, h key-value heads, d head width, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from subtoken_train.calibrations import CalibratedNumbers, check_table, table_words
from subtoken_train.evictions.base import Eviction
from subtoken_train.view.scores import Scores
from subtoken_train.view.view import View


@dataclass(frozen=True)
class HeadDirections(CalibratedNumbers):
    """Direction of the queries of every head: per layer and key-value head, [L, h, d]."""

    direction: list[list[list[float]]]

    def __post_init__(self) -> None:
        for layer, table in enumerate(self.direction):
            check_table(f"direction[{layer}]", table, -1e6, 1e6)
        if len({(len(table), len(table[0])) for table in self.direction}) != 1:
            raise ValueError("direction must hold a table for every layer, all of one shape")

    def check_shape(self, num_layers: int, num_kv_heads: int, head_dim: int) -> None:
        found = len(self.direction), len(self.direction[0]), len(self.direction[0][0])
        if found != (num_layers, num_kv_heads, head_dim):
            raise ValueError(
                f"direction has {found[0]} layers of {found[1]} heads of width {found[2]}, and the backbone "
                f"{num_layers} of {num_kv_heads} of {head_dim}"
            )

    def words(self) -> str:
        lengths = torch.tensor(self.direction).norm(dim=-1).tolist()
        return table_words("length of every head's direction, a line per layer", lengths)


@dataclass(frozen=True)
class QFilter(Eviction):
    """The projection of every key on its head's direction.

    Attributes:
        calibration: file of the directions; None: those of the prompt's own queries.
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
            direction_hd = torch.tensor(self.calibrated.numbers.direction[view.layer]).to(key_BhNd)
            direction_Bhd = direction_hd.expand(len(key_BhNd), -1, -1)
        scores_BhN = (key_BhNd * direction_Bhd[:, :, None]).sum(-1)
        return Scores(scores_BhN, torch.zeros_like(view.entries_BN))


def query_moments(query_BHNd: Tensor, rows_BN: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over the marked rows of the queries' products [B, H, d, d] and of the queries [B, H, d], fp64 on the CPU."""
    marked_BHNd = query_BHNd.double().cpu() * rows_BN[:, None, :, None].cpu()
    return marked_BHNd.transpose(-1, -2) @ marked_BHNd, marked_BHNd.sum(2)


def directions(gram_BHdd: Tensor, sum_BHd: Tensor, kv_heads: int) -> Tensor:
    """Directions of key-value heads, [B, h, d] in fp64, from ``query_moments``."""
    first_BHd = torch.linalg.eigh(gram_BHdd).eigenvectors[..., -1]  # eigenvalues rise
    along_BH1 = (first_BHd * sum_BHd).sum(-1, keepdim=True)
    signed_BHd = torch.where(along_BH1 < 0, -first_BHd, first_BHd)
    return signed_BHd.view(len(sum_BHd), kv_heads, -1, sum_BHd.shape[-1]).mean(2)
