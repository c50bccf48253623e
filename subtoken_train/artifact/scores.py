"""Scores as a model card shows them: a table with intervals, and the Hub's ``model-index`` metadata."""

from __future__ import annotations

from dataclasses import dataclass

from huggingface_hub import EvalResult


@dataclass(frozen=True)
class Score:
    """The mean score of one kind of questions.

    Attributes:
        kind: the kind's name, ``all`` for all questions.
        metric: what is averaged: ``exact_match``, ``f1``, or ``score`` where kinds of both are taken together.
        questions: how many.
        mean: in [0, 1].
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
        """``60.3 [58.9, 61.7]``, in %."""
        return f"{100 * self.mean:.1f} [{100 * self.low:.1f}, {100 * self.high:.1f}]"


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
    for place, score in enumerate(evaluation.own.scores):
        rows.append([f"{score.kind} ({score.questions:,}, {score.metric})", *(arm.scores[place].cell for arm in arms)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def model_index(evaluation: Evaluation, task: str) -> list[EvalResult]:
    """The card's own scores as the Hub's evaluation results, in %."""
    return [
        EvalResult(
            task_type=task,
            dataset_type=evaluation.data,
            dataset_name=evaluation.data,
            dataset_revision=evaluation.digest,
            metric_type=score.metric,
            metric_name=f"{score.kind} [{100 * score.low:.1f}, {100 * score.high:.1f}], 95 % interval",
            metric_value=round(100 * score.mean, 2),
        )
        for score in evaluation.own.scores
    ]
