"""Requests in the order in which they came, all that is read of each before its turn, and what it is told."""

import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from subtoken_train.errors import SubTokenWarning, panics_in_words, refuse
from subtoken_train.families.family import Family
from subtoken_train.functional.gather import on_device
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
    if (notes := getattr(_own, "notes", None)) is not None and issubclass(category, SubTokenWarning):
        notes.append(str(message))
    else:
        _before[0](message, category, *place, **further)


@dataclass(frozen=True)
class Answer:
    """A finished answer, ``stop`` or ``length``; ``cached_tokens`` of the prompt's were there as a compressed context.

    The bytes are of its cache at the end, and of an uncompressed one.
    """

    finish: str
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    cache_bytes: int
    dense_cache_bytes: int
    warnings: list[str]


Event = str | Answer | RefusedError  # A piece of the answer's text; its end; or why there is none


@dataclass(eq=False)
class Job:
    """A request on its way, until a ``deadline`` of ``time.monotonic``.

    ``say`` is called with every event, by the thread that answers; the last one is no text. ``stopped`` is set where
    nobody waits any more; ``answered``: the last event was said. ``came``: when it arrived, by the same clock.
    """

    request: ChatRequest
    say: Callable[[Event], None]
    deadline: float
    ready: Prepared = field(default_factory=Prepared)
    stopped: threading.Event = field(default_factory=threading.Event)
    answered: bool = False
    came: float = field(default_factory=time.monotonic)

    def tell(self, event: Event) -> None:
        """Say an event, and note that it was said."""
        self.answered = self.answered or not isinstance(event, str)
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

    def put_back(self, job: Job) -> None:
        """Let a job that was taken be the first one again."""
        with self._came:
            self._jobs.appendleft(job)

    @property
    def ended(self) -> bool:
        """Return whether no job is there, and none will come."""
        with self._came:
            return bool(self._jobs) and self._jobs[0] is None

    def first(self, waits: bool) -> Job | None:
        """Take the first one; None at the end, and where none is there and none is waited for."""
        with self._came:
            self._came.wait_for(lambda: self._jobs or not waits)
            return self._jobs.popleft() if self._jobs and self._jobs[0] is not None else None
