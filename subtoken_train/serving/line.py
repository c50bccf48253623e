"""Requests in the order in which they came, and what each of them is told.

Only the thread that answers takes from the line; any thread may put a job into it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from subtoken_train.serving.chat_request import ChatRequest, RefusedError
from subtoken_train.serving.prepared import Prepared


@dataclass(frozen=True)
class Answer:
    """A finished answer.

    Attributes:
        finish: ``stop`` or ``length``.
        prompt_tokens: of the whole prompt, before anything is dropped.
        cached_tokens: of them, those whose compressed context was there.
        new_tokens: generated ones.
        cache_bytes: of its cache at the end.
        dense_cache_bytes: of an uncompressed one.
        warnings: what was said on the way.
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
        ready: what its pass reads; there before it is put into the line.
        stopped: set where nobody waits for the answer any more.
        told: whether a piece was said.
        answered: whether the last event was.
    """

    request: ChatRequest
    say: Callable[[Event], None]
    deadline: float
    ready: Prepared = field(default_factory=Prepared)
    stopped: threading.Event = field(default_factory=threading.Event)
    told: bool = False
    answered: bool = False

    def tell(self, event: Event) -> None:
        """Say an event."""
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
