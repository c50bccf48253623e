"""Requests in the order in which they came, and what each is told while a pass answers several of them.

Legend: B rows, N positions.
"""

import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from subtoken_train.errors import SubTokenWarning, panics_in_words, refuse
from subtoken_train.families.family import Family
from subtoken_train.functional.moving import on_device
from subtoken_train.inference.answer_stream import AnswerStream
from subtoken_train.inference.compressed_context import context_batches
from subtoken_train.inference.model import SubTokenModel
from subtoken_train.inference.prefill import reader_of_question
from subtoken_train.inference.text_prompts import QuestionFrame, further_turns
from subtoken_train.serving.chat_request import ChatRequest, Limits, RefusedError
from subtoken_train.types import Batch

_own = threading.local()
_before: list[Callable[..., Any]] = [warnings.showwarning]
_CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Prepared:
    """All that a pass reads of a request, on the CPU: ``inputs`` of a whole prompt, or a context's batch and frames.

    ``question`` are token ids between that context and the answer, ``notes`` what the library warned of.
    """

    inputs: dict[str, Tensor] = field(default_factory=dict)
    batch: Batch | None = None
    frames: list[QuestionFrame] = field(default_factory=list)
    question: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Return how many tokens stand before the answer; of a saved context none is known."""
        if self.batch is not None:
            return self.batch.input_ids_BN.shape[1] + len(self.question)
        return self.inputs["input_ids"].shape[1] if self.inputs else 0


@panics_in_words()
def read_for_pass(model: SubTokenModel, request: ChatRequest, limits: Limits) -> Prepared:
    """Read a request for a model of its own compression; ``ValueError`` where it cannot be read."""
    backbone, asked = model.backbone, request.asked
    with noted() as notes:
        if asked is None:
            prompt = request.messages[0]["content"] if request.raw else request.messages
            how: dict[str, Any] = {"raw": request.raw, "chat_template_kwargs": request.template or None}
            return Prepared(on_device(model.inputs(prompt, request.pictures(limits), **how), _CPU), notes=notes)
        if asked.name is not None:
            return Prepared(notes=notes)
        reads = reader_of_question(backbone, model.compression)
        refuse((reads, f"cache_control compresses before the question is seen, but {reads}; leave it out"))
        context = request.pictures(limits) if isinstance(asked.context, list) else asked.context
        assert context is not None
        how = {"system": asked.system, "by_system": asked.by_system, "chat_template_kwargs": request.template}
        batch, frames = context_batches(backbone, model.compression, [context], **how)
        ids = asked_ids(frames[0], backbone.family, request)
        return Prepared(batch=on_device(batch, _CPU), frames=frames, question=ids, notes=notes)


@panics_in_words()
def asked_ids(frame: QuestionFrame, family: Family, request: ChatRequest) -> list[int]:
    """Return the token ids between a context and the answer, later turns among them."""
    assert request.asked is not None
    if followed := request.asked.followed:
        frame = replace(frame, after=further_turns(family, followed, **request.template))
    return frame.ids(family, request.asked.question)


@contextmanager
def noted() -> Iterator[list[str]]:
    """Collect what the library warns of in this thread; the answers have one, and each request that is read another."""
    warnings.simplefilter("always", SubTokenWarning)
    if warnings.showwarning is not _note:
        _before[0], warnings.showwarning = warnings.showwarning, _note
    _own.notes = []
    try:
        yield _own.notes
    finally:
        _own.notes = None


def _note(message: Warning | str, category: type[Warning], *place: Any, **further: Any) -> None:
    notes = getattr(_own, "notes", None)
    if notes is not None and issubclass(category, SubTokenWarning):
        notes.append(str(message))
    else:
        _before[0](message, category, *place, **further)


@dataclass(frozen=True)
class Answer:
    """A finished answer, ``stop`` or ``length``.

    Of the whole prompt's tokens those are ``cached_tokens`` whose compressed context was there; the bytes are of its
    cache at the end, and of an uncompressed one.
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
    """A request on its way, until a ``deadline`` of ``time.monotonic``.

    ``say`` is called with every event, by the thread that answers; the last one is no text. ``stopped`` is set where
    nobody waits any more; ``told`` and ``answered``: a piece was said, and the last event.
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
    """One answer of a pass, of ``most`` tokens at most; ``since`` is the step at which it ended.

    ``finish``: ``stop``, ``length``, or "" where it was ended from outside; None: it goes on.
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

    ``end`` is called with a row that ended and its place, once, ``waits`` steps later, in which a GPU is asked
    whether its logits were numbers.
    """

    def __init__(self, rows: Sequence[Row], ends: Container[int], end: Callable[[Row, int], None], waits: int) -> None:
        self.rows, self._ends, self._end, self._patience = rows, ends, end, waits
        self._steps = -1  # the prompts' ids come first

    def put(self, ids: Tensor) -> None:
        """Take the ids of all rows, [B]; at first those of the prompts."""
        self._steps += 1
        for row, token in zip(self.rows, ids.tolist() if self._steps else [0] * len(self.rows), strict=True):
            if self._steps == 0:
                row.stream.put(torch.empty(0))
            elif row.finish is None:
                row.put(token, self._ends, self._steps)
        self.close(self._patience)

    def end(self) -> None:
        """Do nothing: rows end by themselves."""

    def __call__(self, ids_BN: Tensor, scores: Any, **further: Any) -> Tensor:
        """Return which rows end here, bool [B]."""
        return torch.tensor([row.finish is not None for row in self.rows], device=ids_BN.device)

    def close(self, patience: int = 0) -> None:
        """Tell the ends that were held back; all of them once ``generate`` has returned."""
        for place, row in enumerate(self.rows):
            if row.finish is not None and row.since <= self._steps - patience and not row.job.answered:
                self._end(row, place)
