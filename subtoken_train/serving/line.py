"""Requests in the order in which they came, and what each is told while a pass answers several of them.

Only the thread that answers takes from the line; any thread may put a job into it.

Legend: B rows, N positions.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from subtoken_train.inference.answer_stream import AnswerStream
from subtoken_train.serving.chat_request import ChatRequest, RefusedError
from subtoken_train.serving.prepared import Prepared


@dataclass(frozen=True)
class Answer:
    """A finished answer.

    Attributes:
        finish: ``stop`` or ``length``.
        prompt_tokens: of the whole prompt, before anything is dropped.
        cached_tokens: of them, those whose compressed context was there.
        cache_bytes, dense_cache_bytes: of its cache at the end, and of an uncompressed one.
    """

    finish: str
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    cache_bytes: int
    dense_cache_bytes: int
    warnings: list[str]


Event = str | Answer | RefusedError
"""A piece of the answer's text; its end; or why there is none."""


@dataclass(eq=False)
class Job:
    """A request on its way.

    Attributes:
        say: called with every event, by the thread that answers; the last one is no text.
        deadline: of ``time.monotonic``.
        ready: what its pass reads.
        stopped: set where nobody waits for the answer any more.
        told, answered: whether a piece was said, and the last event.
    """

    request: ChatRequest
    say: Callable[[Event], None]
    deadline: float
    ready: Prepared = field(default_factory=Prepared)
    stopped: threading.Event = field(default_factory=threading.Event)
    told: bool = False
    answered: bool = False

    def tell(self, event: Event) -> None:
        """Say an event, and note that it was said."""
        self.told, self.answered = True, not isinstance(event, str)
        self.say(event)

    def is_over(self) -> bool:
        """Return whether the answer is of no more use."""
        return self.stopped.is_set() or time.monotonic() > self.deadline


class Line:
    """Jobs that wait; how many may, is for the caller to see to."""

    def __init__(self) -> None:
        self._jobs: deque[Job | None] = deque()
        self._came = threading.Condition()

    def put(self, job: Job | None) -> None:
        """Add a job at the end; None: no job comes after those that wait."""
        with self._came:
            self._jobs.append(job)
            self._came.notify()

    def first(self) -> Job | None:
        """Take the first one, waiting for it; None at the end."""
        with self._came:
            self._came.wait_for(lambda: self._jobs)
            return self._jobs.popleft()

    def waiting(self) -> list[Job]:
        """Return those that wait now, and leave them there."""
        with self._came:
            return [job for job in self._jobs if job is not None]

    def remove(self, jobs: Collection[Job]) -> None:
        """Take some that wait."""
        with self._came:
            for job in jobs:
                self._jobs.remove(job)


@dataclass(eq=False)
class Row:
    """One answer of a pass, of ``most`` tokens at most.

    Attributes:
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

    @property
    def new_tokens(self) -> int:
        """Tokens of the answer so far."""
        return len(self.stream.token_ids)

    def put(self, token: int, ends: Container[int], step: int) -> None:
        """Take the next token of one that goes on."""
        self.stream.put(torch.tensor([token]))
        if self.stream.ended or token in ends:
            self.finish = "stop"
        elif self.new_tokens >= self.most:
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
