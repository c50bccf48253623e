"""Base of every task's metric: scores over predictions and references, and a score per sample."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

Prediction = str | list[float]
"""A generated answer, or the log-likelihood of each choice. The runner strips answers but those of ``keep_space``."""


class TaskMetric(ABC):
    """Scores of a task over the answers that it took, which it holds."""

    higher_is_better: ClassVar[bool] = True
    points: ClassVar[frozenset[str]] = frozenset()
    """Scores that are no fractions (MME's points, CIDEr, perplexity); all others lie in 0..1."""
    subtasks: ClassVar[tuple[str, ...]] = ()
    """Scores of the benchmark's own tasks, where its printed score is the mean over them: each counts as a task where
    losses are averaged over tasks (KVCompose's equation 10)."""

    def __init__(self) -> None:
        self.rows: list[tuple[Any, Mapping[str, Any]]] = []

    def update(self, predictions: Sequence[Prediction], references: Sequence[Mapping[str, Any]]) -> None:
        """Take predictions with the ``reference`` of their samples."""
        self.rows += zip(predictions, references, strict=True)

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
        found: dict[str, list[float]] = {name: [] for name in self.names}
        for row in self.rows:
            for name, value in self.figures(*row).items():
                found[name].append(value)
        return {name: mean(values) for name, values in found.items() if values}

    @classmethod
    def score(cls, prediction: Any, reference: Mapping[str, Any]) -> float:
        return cls.figures(prediction, reference)[cls.names[0]]


def mean_of(name: str, rule: Callable[[Any, Mapping[str, Any]], float]) -> type[MeanScores]:
    """Make the metric that has one score, the mean of what a rule says of prediction and reference, 0 to 1."""

    class RuleScores(MeanScores):
        names = (name,)

        @staticmethod
        def figures(prediction: Any, reference: Mapping[str, Any]) -> dict[str, float]:
            return {name: float(rule(prediction, reference))}

    return RuleScores


class MeanOfTasks(MeanScores):
    """``total``: the mean over the benchmark's own tasks (``names``) of their means, which stand beside it."""

    total: ClassVar[str]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.subtasks = cls.names

    def compute(self) -> dict[str, float]:
        means = super().compute()
        return {self.total: mean([*means.values()]), **means} if means else {}

    @classmethod
    def score(cls, prediction: Any, reference: Mapping[str, Any]) -> float:
        """Return the sample's term of its task's mean."""
        (value,) = cls.figures(prediction, reference).values()
        return value


def mean(values: Sequence[float]) -> float:
    """Return the mean of at least one number, or of marks (True is 1)."""
    return sum(values) / len(values)
