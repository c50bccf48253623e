"""Base of every task's metric: a torchmetrics metric over predictions and references, with a score per sample.

Two kinds of it: means over samples, whose subclasses say which figures one answer gets; and metrics in which samples
belong together: pairs of one image, rotations of one question.

Legend: N samples, M marks, G groups, S scores.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric

Prediction = str | list[float]
"""A generated answer, or the log-likelihood of each choice. The runner strips answers but those of ``keep_space``."""


class TaskMetric(Metric):
    """Scores of a task.

    States reduce under DDP as torchmetrics reduces them (sums, or concatenated tensors), so that processes that saw
    different samples give the scores of one that saw all. Nothing is matched by order: what belongs together carries an
    id.
    """

    full_state_update = False
    higher_is_better = True
    points: ClassVar[frozenset[str]] = frozenset()
    """Scores that are no fractions (MME's points, CIDEr, perplexity); all others lie in 0..1."""
    subtasks: ClassVar[tuple[str, ...]] = ()
    """Scores of the benchmark's own tasks, where its printed score is the mean over them: each counts as a task where
    losses are averaged over tasks (KVCompose's equation 10)."""

    @abstractmethod
    def update(self, predictions: Sequence[Prediction], references: Sequence[Mapping[str, Any]]) -> None:
        """Take predictions with the ``reference`` of their samples."""

    @abstractmethod
    def compute(self) -> dict[str, Tensor]:
        """Scores by name. References' oddities are scores of their own name (``llava_f1``), never mixed into others."""

    @staticmethod
    @abstractmethod
    def score(prediction: Prediction, reference: Mapping[str, Any]) -> float:
        """Return the sample alone, usually in 0..1: what paired intervals and bars are made of.

        For a metric that is a mean over samples it is that sample's term; for others (F1, CIDEr, circular accuracy) it
        is the closest per-sample figure, and the class says which.
        """


class MeanScores(TaskMetric):
    """The mean of every score over the samples that have it; only sums and counts are held, in double precision."""

    names: ClassVar[tuple[str, ...]]
    """All scores; the first is the sample's own (``score``)."""

    sums_S: Tensor
    counts_S: Tensor

    def __init__(self) -> None:
        super().__init__()
        zeros_S = torch.zeros(len(self.names), dtype=torch.float64)
        self.add_state("sums_S", zeros_S, dist_reduce_fx="sum")
        self.add_state("counts_S", zeros_S.clone(), dist_reduce_fx="sum")

    @staticmethod
    @abstractmethod
    def figures(prediction: Any, reference: Mapping[str, Any]) -> dict[str, float]:
        """Return one answer's scores, in 0..1. A score that is taken over other samples only is left out."""

    def update(self, predictions: Sequence[Prediction], references: Sequence[Mapping[str, Any]]) -> None:
        """Take answers with the references of their samples."""
        for prediction, reference in zip(predictions, references, strict=True):
            found = self.figures(prediction, reference)
            self.sums_S += self.sums_S.new_tensor([found.get(name, 0.0) for name in self.names])
            self.counts_S += self.counts_S.new_tensor([name in found for name in self.names])

    def compute(self) -> dict[str, Tensor]:
        """Return means by name; a score that no sample had is left out."""
        means_S = self.sums_S / self.counts_S
        return {name: mean for name, mean, count in zip(self.names, means_S, self.counts_S, strict=True) if count > 0}

    @classmethod
    def score(cls, prediction: Prediction, reference: Mapping[str, Any]) -> float:
        """Return the sample's term of the mean that is named first."""
        return cls.figures(prediction, reference)[cls.names[0]]


class Groups(NamedTuple):
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

    @staticmethod
    @abstractmethod
    def marked(prediction: Any, reference: Mapping[str, Any]) -> tuple[int, int]:
        """Return a sample's key, and its marks as bits of a number."""

    def update(self, predictions: Sequence[Prediction], references: Sequence[Mapping[str, Any]]) -> None:
        """Take generated answers."""
        rows = [self.marked(*pair) for pair in zip(predictions, references, strict=True)]
        assert isinstance(self.keys_N, list)
        assert isinstance(self.marks_N, list)
        keys_and_marks_N2 = torch.tensor(rows, dtype=torch.int64, device=self.device).reshape(-1, 2)
        self.keys_N.append(keys_and_marks_N2[:, 0])
        self.marks_N.append(keys_and_marks_N2[:, 1])

    def kept(self) -> tuple[Tensor, Tensor]:
        """Return the keys and marks of all samples, each N long."""
        return _together(self.keys_N), _together(self.marks_N)


def group_key(name: str) -> int:
    """Return a number for a group's name: 63 bits of its SHA-256, the same in every process."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1


def groups_of(keys_N: Tensor, marks_NM: Tensor) -> Groups:
    """Put samples with the same key (64-bit integers) together; marks are booleans."""
    _, group_N, sizes_G = torch.unique(keys_N, return_inverse=True, return_counts=True)
    count_GM = torch.zeros(len(sizes_G), marks_NM.shape[1], dtype=torch.int64, device=keys_N.device)
    count_GM.index_add_(0, group_N, marks_NM.long())
    return Groups(sizes_G, count_GM == sizes_G[:, None], count_GM)


def bits_of(marks_N: Tensor, number: int) -> Tensor:
    """Return the lowest ``number`` bits of each mark as booleans, N x M, lowest first."""
    return (marks_N[:, None] >> torch.arange(number, device=marks_N.device)) % 2 == 1


def _together(state: list[Tensor] | Tensor) -> Tensor:
    if isinstance(state, Tensor):
        return state.long()
    return torch.cat(state) if state else torch.zeros(0, dtype=torch.int64)
