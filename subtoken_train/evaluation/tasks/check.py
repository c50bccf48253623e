"""x."""

from __future__ import annotations
from collections.abc import Sequence
from subtoken_train.evaluation.tasks.base import Sample, Task


def check_complete(task: Task, samples: Sequence[Sample], limit: int | None) -> None:
    """X."""
