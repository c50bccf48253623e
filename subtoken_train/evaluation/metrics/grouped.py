"""Metrics in which samples belong together: pairs of one image, rotations of one question.

Legend: N samples, M marks, G groups.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from subtoken_train.evaluation.metrics.metric import TaskMetric


@dataclass(frozen=True)
class Groups:
    """Samples put together by their keys.

    Attributes:
        sizes_G: samples of each group.
        all_GM: marks that all samples of a group have.
        count_GM: how many samples of a group have the mark.
    """

    sizes_G: Tensor
    all_GM: Tensor
    count_GM: Tensor


class GroupedMetric(TaskMetric):
    """Keeps a key and a few marks (yes or no each) of every sample: 16 bytes, gathered from all processes."""

    keys_N: list[Tensor] | Tensor
    marks_N: list[Tensor] | Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("keys_N", [], dist_reduce_fx="cat")
        self.add_state("marks_N", [], dist_reduce_fx="cat")
        # What a process without samples contributes has the metric's type, and all must have the same.
        self.set_dtype(torch.int64)

    def take(self, samples: Iterable[tuple[int, int]]) -> None:
        """Keep samples: key, and marks as bits of a number."""
        rows = list(samples)
        assert isinstance(self.keys_N, list)
        assert isinstance(self.marks_N, list)
        self.keys_N.append(torch.tensor([key for key, _ in rows], dtype=torch.int64, device=self.device))
        self.marks_N.append(torch.tensor([marks for _, marks in rows], dtype=torch.int64, device=self.device))

    def kept(self) -> tuple[Tensor, Tensor]:
        """Keys and marks of all samples, each N long."""
        return _together(self.keys_N), _together(self.marks_N)


def group_key(name: str) -> int:
    """A number for a group's name: 63 bits of its SHA-256, the same in every process."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1


def groups_of(keys_N: Tensor, marks_NM: Tensor) -> Groups:
    """Put samples with the same key together.

    Args:
        keys_N: 64-bit integers.
        marks_NM: booleans.
    """
    _, group_N, sizes_G = torch.unique(keys_N, return_inverse=True, return_counts=True)
    count_GM = torch.zeros(len(sizes_G), marks_NM.shape[1], dtype=torch.int64, device=keys_N.device)
    count_GM.index_add_(0, group_N, marks_NM.long())
    return Groups(sizes_G, count_GM == sizes_G[:, None], count_GM)


def bits_of(marks_N: Tensor, number: int) -> Tensor:
    """The lowest ``number`` bits of each mark as booleans, N x M, lowest first."""
    return (marks_N[:, None] >> torch.arange(number, device=marks_N.device)) % 2 == 1


def _together(state: list[Tensor] | Tensor) -> Tensor:
    if isinstance(state, Tensor):
        return state.long()
    return torch.cat(state) if state else torch.zeros(0, dtype=torch.int64)
