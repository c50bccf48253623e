"""One pass whose rows are answers to several requests: what each is told as it grows, and when it ends.

Legend: B rows, N positions.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from subtoken_train.inference.answer_stream import AnswerStream
from subtoken_train.serving.line import Job


@dataclass(eq=False)
class Row:
    """One answer of a pass.

    Attributes:
        job: whose it is.
        prompt_tokens, cached_tokens: see ``Answer``.
        most: tokens of the answer, at most.
        stream: of its text.
        finish: ``stop``, ``length``, or "" where it was ended from outside; None: it goes on.
        since: the step at which it ended.
    """

    job: Job
    prompt_tokens: int
    cached_tokens: int
    most: int
    stream: AnswerStream
    finish: str | None = None
    since: int = 0

    def put(self, token: int, ends: Container[int], step: int) -> None:
        """Take the next token of one that goes on."""
        self.stream.put(torch.tensor([token]))
        if self.stream.ended or token in ends:
            self.finish = "stop"
        elif len(self.stream.token_ids) >= self.most:
            self.finish = "length"
        elif self.job.is_over():
            self.finish = ""
        else:
            return
        self.stream.end()
        self.since = step


class SharedPass:
    """A streamer and a stopping criterion of ``generate`` for all rows of a pass; rows that ended say padding.

    Args:
        rows: in the order of the pass.
        ends: tokens that end an answer.
        end: called with a row that ended and its place, once; tells its job.
        patience: steps for which an end is held back, in which a GPU is asked whether its logits were numbers.
    """

    def __init__(
        self, rows: Sequence[Row], ends: Container[int], end: Callable[[Row, int], None], patience: int
    ) -> None:
        self.rows, self._ends, self._end, self._patience = rows, ends, end, patience
        self._steps = -1  # the prompts' ids come first

    def put(self, ids: Tensor) -> None:
        """Take the ids of all rows, [B]; at first those of the prompts."""
        self._steps += 1
        if self._steps == 0:
            for row in self.rows:
                row.stream.put(torch.empty(0))
            return
        for row, token in zip(self.rows, ids.tolist(), strict=True):
            if row.finish is None:
                row.put(token, self._ends, self._steps)
        self._tell(self._steps - self._patience)

    def end(self) -> None:
        """Do nothing: rows end by themselves."""

    def __call__(self, ids_BN: Tensor, scores: Any, **further: Any) -> Tensor:
        """Return which rows end here, bool [B]."""
        return torch.tensor([row.finish is not None for row in self.rows], device=ids_BN.device)

    def close(self) -> None:
        """Tell the ends that were held back, once ``generate`` has returned."""
        self._tell(self._steps)

    def _tell(self, until: int) -> None:
        for place, row in enumerate(self.rows):
            if row.finish is not None and row.since <= until and not row.job.answered:
                self._end(row, place)
