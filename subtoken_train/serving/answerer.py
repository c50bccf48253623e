"""Requests answered one at a time by one thread, in the order in which they came.

A pass has one compression, and a packed cache takes no further rows once it is filled: requests of several evictions
and budgets cannot share a pass, and one that comes later cannot join the steps of another. So they wait, in a line.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from subtoken_train.errors import SubTokenWarning
from subtoken_train.families.positions import position_bound
from subtoken_train.inference.answer_stream import AnswerStream
from subtoken_train.inference.arm_spec import ArmSpec
from subtoken_train.inference.batched import end_ids
from subtoken_train.inference.cache_report import CacheReport
from subtoken_train.inference.compressed_context import CompressedContext, context_batches
from subtoken_train.inference.compression import Compression, settings_record
from subtoken_train.inference.generation import serving
from subtoken_train.inference.model import SubTokenModel
from subtoken_train.inference.prefill import reader_of_question
from subtoken_train.inference.text_prompts import further_turns
from subtoken_train.serving.chat_request import ChatRequest, ContextQuestion, Limits, RefusedError
from subtoken_train.serving.context_store import ContextStore

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answer:
    """A finished answer.

    Attributes:
        finish: ``stop`` or ``length``.
        prompt_tokens: of the whole prompt, before anything is dropped.
        cached_tokens: of them, those whose compressed context was there.
        new_tokens: generated ones.
        report: of the cache at the end.
        warnings: what was said on the way.
    """

    finish: str
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    report: CacheReport
    warnings: list[str]


Event = str | Answer | RefusedError
"""A piece of the answer's text; its end; or why there is none."""


@dataclass(frozen=True, eq=False)
class Job:
    """A request on its way.

    Attributes:
        say: called with every event, by the thread that answers; the last one is no text.
        deadline: of ``time.monotonic``.
        stopped: set where nobody waits for the answer any more.
    """

    request: ChatRequest
    say: Callable[[Event], None]
    deadline: float
    stopped: threading.Event = field(default_factory=threading.Event)

    def is_over(self) -> bool:
        """Return whether the answer is of no more use."""
        return self.stopped.is_set() or time.monotonic() > self.deadline


class Answerer:
    """Answers jobs on one loaded model.

    Args:
        model: loaded as ``spec`` says.
        spec: the server's own compression; a request's eviction takes the place of its eviction.
        limits: of a request.
        contexts: what is kept between requests.
    """

    def __init__(self, model: SubTokenModel, spec: ArmSpec, limits: Limits, contexts: ContextStore) -> None:
        self.limits, self.contexts = limits, contexts
        self._model, self._spec = model, spec
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Put a job into the line; how long that may be is for the caller to see to."""
        self._jobs.put(job)

    def close(self) -> None:
        """Answer what is in the line, then end."""
        self._jobs.put(None)
        self._thread.join()

    def compression(self, request: ChatRequest) -> Compression:
        """Return the compression of a request.

        Raises:
            ValueError: it does not exist, or does not fit the model.
        """
        if request.eviction is None and request.eviction_keep is None:
            return self._model.compression
        name = self._spec.eviction if request.eviction is None else request.eviction
        chosen: dict[str, Any] = {"eviction": name, "eviction_keep": request.eviction_keep, "written": "argument"}
        if name in (None, "none"):
            if request.eviction_keep is not None:
                raise ValueError("eviction_keep needs an eviction; name one, or leave it out")
            chosen |= {"eviction": None, "eviction_every": None, "scope": None}
        if name != self._spec.eviction:
            chosen |= {"eviction_options": {}}
        compression = replace(self._spec, **chosen).compression(self._model.compression.round_up)
        compression.check(self._model.backbone.family)
        return compression

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job.say(self._outcome(job))
            except Exception:  # nobody hears it
                _log.exception("an answer was lost")

    def _outcome(self, job: Job) -> Answer | RefusedError:
        if job.is_over():
            return _too_late("its turn did not come")
        try:
            answer = self._answered(job)
        except RefusedError as error:
            return error
        except ValueError as error:
            return RefusedError(400, str(error))
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return RefusedError(503, "there is not enough memory for this prompt; send a shorter one")
        except Exception:
            _log.exception("a request failed")
            return RefusedError(500, "the server failed at this request; its log says why")
        return answer if answer.finish else _too_late(f"{answer.new_tokens} tokens were made")

    def _answered(self, job: Job) -> Answer:
        """Answer one job; ``finish`` is empty where it was stopped from outside."""
        request, model = job.request, SubTokenModel.around(self._model.backbone, self.compression(job.request))
        stream = AnswerStream(model.tokenizer, job.say, job.is_over, request.stops)
        asking = partial(self._ask_whole, model) if request.asked is None else partial(self._ask_context, model)
        device = self._model.backbone.family.device
        drawn_apart = torch.random.fork_rng([device] if device.type == "cuda" else [], enabled=request.seed is not None)
        with warnings.catch_warnings(record=True) as said, drawn_apart:
            warnings.simplefilter("always", SubTokenWarning)
            if request.seed is not None:
                torch.manual_seed(request.seed)
            settings = {**request.settings, "streamer": stream, "stopping_criteria": [stream]}
            prompt, cached, most, report = asking(request, settings)
        made = stream.token_ids
        finish = "stop" if stream.ended or made[-1] in end_ids(model.backbone.family) else ""
        notes = [str(note.message) for note in said if issubclass(note.category, SubTokenWarning)]
        return Answer(finish or ("length" if len(made) >= most else ""), prompt, cached, len(made), report, notes)

    def _ask_whole(
        self, model: SubTokenModel, request: ChatRequest, settings: dict[str, Any]
    ) -> tuple[int, int, int, CacheReport]:
        """Compress a whole prompt and answer it: tokens of the prompt and of those cached, most new ones, the cache."""
        inputs: dict[str, Any] = model.inputs(request.messages, request.pictures(self.limits))
        tokens = int(inputs["input_ids"].shape[1])
        most = self._room(request, tokens)
        model.generate(**inputs, **settings, max_new_tokens=most)
        return tokens, 0, most, model.cache_report()

    def _ask_context(
        self, model: SubTokenModel, request: ChatRequest, settings: dict[str, Any]
    ) -> tuple[int, int, int, CacheReport]:
        """Likewise, with a question about a context that is kept."""
        asked, family = request.asked, model.backbone.family
        assert asked is not None
        after = further_turns(family, asked.followed) if asked.followed else None
        context, found = self._context(model, request, asked)
        held = context.packed.prompt_length
        tokens = held + context.question_length(asked.question, after)
        most = self._room(request, tokens)
        _, report = context.generate(asked.question, after, max_new_tokens=most, **settings)
        return tokens, held if found else 0, most, report

    def _context(
        self, model: SubTokenModel, request: ChatRequest, asked: ContextQuestion
    ) -> tuple[CompressedContext, bool]:
        """Return the context that a request asks about, and whether it was there."""
        backbone, compression = model.backbone, model.compression
        how = json.dumps(settings_record(compression))
        if asked.name is not None:
            path = self.contexts.saved(asked.name)
            if path is None:
                raise RefusedError(404, f"there is no saved context {asked.name!r}", "context_not_found")
            seen = path.stat()
            key: Hashable = (asked.name, seen.st_mtime_ns, seen.st_size, how)
            return self.contexts.take(key, partial(_loaded, path, model))
        if (reads := reader_of_question(backbone, compression)) is not None:
            raise ValueError(f"cache_control compresses before the question is seen, but {reads}; leave it out")
        context = request.pictures(self.limits) if isinstance(asked.context, list) else asked.context
        assert context is not None
        batch, frames = context_batches(
            backbone, compression, [context], system=asked.system, by_system=asked.by_system
        )
        self._room(request, batch.input_ids_BN.shape[1])

        def compress() -> CompressedContext:
            with serving(backbone.family):
                return CompressedContext.of(backbone, compression, batch, frames)

        return self.contexts.take((*batch.record_ids, asked.by_system, asked.system, how), compress)

    def _room(self, request: ChatRequest, tokens: int) -> int:
        """Return the most new tokens after a prompt of so many.

        Raises:
            RefusedError: the model was not made for so many.
        """
        bound = position_bound(self._model.backbone.family.decoder.config)
        most = request.max_new_tokens or self.limits.max_new_tokens
        room = most if bound is None else bound - tokens
        if room < (request.max_new_tokens or 1):
            raise RefusedError(
                400,
                f"the prompt has {tokens:,} tokens and the answer {request.max_new_tokens or 1:,}, but the model was "
                f"made for {bound:,} together; send less",
                "context_length_exceeded",
            )
        return min(most, room)


def _loaded(path: Any, model: SubTokenModel) -> CompressedContext:
    context = CompressedContext.load(path, model.backbone, model.compression)
    if len(context.frames) != 1:
        raise ValueError(f"the saved context {path.stem!r} holds {len(context.frames)} contexts; a request asks one")
    return context


def _too_late(words: str) -> RefusedError:
    return RefusedError(503, f"the time for one request is over; {words}: ask for less, or again later")
