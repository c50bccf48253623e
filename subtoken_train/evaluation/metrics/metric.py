"""Base of every task's metric: a torchmetrics metric over predictions and references, with a score per sample."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

import torch.distributed
from torchmetrics import Metric

from subtoken_train.types import grouped

Prediction = str | list[float]
"""A generated answer, or the log-likelihood of each choice. The runner strips answers but those of ``keep_space``."""


class TaskMetric(Metric):
    """Scores of a task over the answers that it took, which it holds; under DDP every process scores all answers."""

    full_state_update = False
    higher_is_better = True
    points: ClassVar[frozenset[str]] = frozenset()
    """Scores that are no fractions (MME's points, CIDEr, perplexity); all others lie in 0..1."""
    subtasks: ClassVar[tuple[str, ...]] = ()
    """Scores of the benchmark's own tasks, where its printed score is the mean over them: each counts as a task where
    losses are averaged over tasks (KVCompose's equation 10)."""

    rows: list[tuple[Any, Mapping[str, Any]]]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", [], dist_reduce_fx=None)

    def update(self, predictions: Sequence[Prediction], references: Sequence[Mapping[str, Any]]) -> None:
        """Take predictions with the ``reference`` of their samples."""
        self.rows += zip(predictions, references, strict=True)

    def _sync_dist(self, *_: Any, process_group: Any = None, **__: Any) -> None:
        parts: list[Any] = [None] * torch.distributed.get_world_size(process_group)
        torch.distributed.all_gather_object(parts, self.rows, group=process_group)
        self.rows = [row for part in parts for row in part]

    @abstractmethod
    def compute(self) -> dict[str, float]:
        """Return scores by name. References' oddities are scores of their own name (``llava_f1``), never mixed in."""

    @staticmethod
    @abstractmethod
    def score(prediction: Any, reference: Mapping[str, Any]) -> float:
        """Return the sample's own score, for paired intervals: a mean's term, else the closest figure."""


class MeanScores(TaskMetric):
    """The mean of every score over the samples that have it."""

    names: ClassVar[tuple[str, ...]]
    """All scores; the first is the sample's own (``score``)."""

    @staticmethod
    @abstractmethod
    def figures(prediction: Any, reference: Mapping[str, Any]) -> dict[str, float]:
        """Return one answer's scores, in 0..1. A score that is taken over other samples only is left out."""

    def compute(self) -> dict[str, float]:
        """Return means by name; a score that no sample had is left out."""
        found = grouped(figure for row in self.rows for figure in self.figures(*row).items())
        assert found.keys() <= set(self.names)
        return {name: mean(found[name]) for name in self.names if name in found}

    @classmethod
    def score(cls, prediction: Any, reference: Mapping[str, Any]) -> float:
        return cls.figures(prediction, reference)[cls.names[0]]


Rule = Callable[[Any, Mapping[str, Any]], float]
"""Scores an answer, 0 to 1, by its reference."""


def mean_of(name: str, rule: Rule, parts: Mapping[str, Sequence[str]] | None = None) -> type[MeanScores]:
    """Make the metric whose score is the mean of what a rule says of prediction and reference, 0 to 1.

    ``parts``: keys of the reference and their values; each value names the mean over the samples that have it.
    """

    class RuleScores(MeanScores):
        names = (name, *chain.from_iterable((parts or {}).values()))

        @staticmethod
        def figures(prediction: Any, reference: Mapping[str, Any]) -> dict[str, float]:
            return dict.fromkeys((name, *(reference[key] for key in parts or ())), float(rule(prediction, reference)))

    return RuleScores


def mean_of_tasks(total: str, key: str, tasks: tuple[str, ...], rule: Rule) -> type[MeanScores]:
    """Make the metric whose score is the mean over the benchmark's own tasks of their means, which stand beside it.

    ``key`` of a reference holds the sample's task; the rule says the sample's term of that task's mean.
    """

    class TaskScores(MeanScores):
        names = subtasks = tasks

        def compute(self) -> dict[str, float]:
            means = super().compute()
            return {total: mean([*means.values()]), **means} if means else {}

        @staticmethod
        def figures(prediction: Any, reference: Mapping[str, Any]) -> dict[str, float]:
            return {reference[key]: rule(prediction, reference)}

        @classmethod
        def score(cls, prediction: Any, reference: Mapping[str, Any]) -> float:
            return rule(prediction, reference)

    return TaskScores


def mean(values: Sequence[float]) -> float:
    """Return the mean of at least one number, or of marks (True is 1)."""
    return sum(values) / len(values)
