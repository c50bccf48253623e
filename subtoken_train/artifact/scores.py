"""Scores as a model card shows them: a table with intervals, and the Hub's ``model-index`` metadata."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from huggingface_hub import EvalResult

NATS = frozenset({"log_likelihood"})
"""Metrics in nats per token; all others are fractions, printed in %."""


@dataclass(frozen=True)
class Score:
    """The mean score of one kind of questions.

    Attributes:
        kind: the kind's name, ``all`` for all questions.
        metric: what is averaged: ``exact_match``, ``f1``, ``score`` where kinds of both are taken together, or the name
            of a measure beside the score.
        questions: how many.
        mean: a fraction, or nats.
        low: lower end of the 95 % interval.
        high: its upper end.
    """

    kind: str
    metric: str
    questions: int
    mean: float
    low: float
    high: float

    @property
    def cell(self) -> str:
        """``60.3 [58.9, 61.7]``, see ``printed``."""
        return f"{printed(self.metric, self.mean)} {self.interval}"

    @property
    def interval(self) -> str:
        """``[58.9, 61.7]``."""
        return f"[{printed(self.metric, self.low)}, {printed(self.metric, self.high)}]"


def printed(metric: str, figure: float, sign: Literal["", "+"] = "", more: int = 0) -> str:
    """A figure of a metric as tables print it: ``60.3``, in %, or ``-0.312``, in nats.

    Args:
        metric: its name.
        figure: a mean, an end of its interval, or a difference.
        sign: ``+`` for differences.
        more: further digits.
    """
    return f"{figure:{sign}.{3 + more}f}" if metric in NATS else f"{100 * figure:{sign}.{1 + more}f}"


@dataclass(frozen=True)
class CardColumn:
    """One adapter's or backbone's scores; ``facts`` are short statements of its budget, by name."""

    name: str
    facts: dict[str, str]
    scores: tuple[Score, ...]


@dataclass(frozen=True)
class Evaluation:
    """Arms that answered the same questions.

    Attributes:
        data: name of the questions.
        digest: their SHA-256.
        own: the arm that the card is about.
        others: what it is compared with.
    """

    data: str
    digest: str
    own: CardColumn
    others: tuple[CardColumn, ...] = ()


def score_table(evaluation: Evaluation) -> str:
    """A Markdown table: one column per arm, its budget, then the score of every kind."""
    arms = (evaluation.own, *evaluation.others)
    rows = [["", *(arm.name for arm in arms)], ["---"] * (len(arms) + 1)]
    rows += [[name, *(arm.facts.get(name, "") for arm in arms)] for name in evaluation.own.facts]
    cells = [{(score.kind, score.metric): score.cell for score in arm.scores} for arm in arms]
    for score in evaluation.own.scores:
        row, key = f"{score.kind} ({score.questions:,}, {score.metric})", (score.kind, score.metric)
        rows.append([row, *(of_arm.get(key, "") for of_arm in cells)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def model_index(evaluation: Evaluation, task: str) -> list[EvalResult]:
    """The card's own scores as the Hub's evaluation results, in %; log-likelihoods in nats per token."""
    return [
        EvalResult(
            task_type=task,
            dataset_type=evaluation.data,
            dataset_name=evaluation.data,
            dataset_revision=evaluation.digest,
            metric_type=score.metric,
            metric_name=f"{score.kind}, {score.metric} {score.interval}, 95 % interval",
            metric_value=float(printed(score.metric, score.mean, more=1)),
        )
        for score in evaluation.own.scores
    ]
