"""Requests answered by one thread: they begin in the order in which they came, and run together, whatever each asks."""

import json
import logging
import re
import threading
import time
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subtoken_train.cache.cache import PackedCache
from subtoken_train.documents import check_file_name, real_path
from subtoken_train.errors import SubTokenWarning
from subtoken_train.families.positions import position_bound
from subtoken_train.functional.gather import on_device
from subtoken_train.inference.answer_stream import AnswerStream
from subtoken_train.inference.arm_spec import ArmSpec
from subtoken_train.inference.cache_report import warn_of_emptied
from subtoken_train.inference.compressed_context import CompressedContext
from subtoken_train.inference.compression import Compression, settings_record
from subtoken_train.inference.generation import GenerateCall, serving, steered_from_outside
from subtoken_train.inference.model import SubTokenModel
from subtoken_train.inference.prefill import append_rest, prefill
from subtoken_train.inference.prompt_inputs import IMAGE_INPUTS, batch_from_inputs
from subtoken_train.reducers.contexts import ScoredContext
from subtoken_train.serving.chat_request import ChatRequest, Limits, RefusedError
from subtoken_train.serving.line import Job, Line, Prepared, asked_ids, noted, read_for_pass
from subtoken_train.serving.rows import Row, RunningRows, TokenChoice, use_onednn

_log = logging.getLogger(__name__)
CHUNK = 256  # tokens of a prompt that run at a time while other answers wait for their next token
PATIENCE = 0.1  # seconds between two tokens of running answers that prompts may take, or as long as a step took
BROKEN, TOO_LONG = "the server failed at this request; its log says why", "context_length_exceeded"
_FOLDERS = re.compile(r"(?<![\w:/.])/(?:[\w.@+-]+/)+")  # of paths from the root on


class ContextStore:
    """Holds contexts, and lets the least recently used ones go when they take more than a budget.

    One thread takes; others may read the counts. Saved ones are ``NAME.safetensors`` of a folder.
    """

    def __init__(self, budget: int, folder: Path | None = None) -> None:
        self.budget, self.folder = budget, folder
        self.taken = self.found = self.nbytes = 0
        self._held: OrderedDict[Hashable, CompressedContext] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def take(self, key: Hashable, make: Callable[[], CompressedContext]) -> tuple[CompressedContext, bool]:
        """Return the context of a key, and whether it was there; else ``make`` makes it."""
        if key in self._held:
            self._held.move_to_end(key)
            self.found += 1
            return self._held[key], True
        context, self.taken = make(), self.taken + 1
        if (size := context.report.total_bytes) <= self.budget:
            while self.nbytes + size > self.budget:
                self.nbytes -= self._held.popitem(last=False)[1].report.total_bytes
            self._held[key] = context
            self.nbytes += size
        return context, False

    def saved(self, name: str) -> Path:
        """Return the file of a saved context, once it is there."""
        check_file_name(name, "context")
        path = None if self.folder is None else self.folder / f"{name}.safetensors"
        if path is None or not path.is_file():
            raise RefusedError(404, f"there is no saved context {name!r}", "context_not_found")
        return path


class Answerer:
    """Answers jobs on one model, loaded as ``spec`` says; a request's eviction takes the place of the spec's."""

    def __init__(self, model: SubTokenModel, spec: ArmSpec, limits: Limits, contexts: ContextStore) -> None:
        self.limits, self.contexts, self.replaced = limits, contexts, 0
        self._model, self._spec, self._family = model, spec, model.backbone.family
        own = model.generation_config
        self._stops = [own.stop_strings] if isinstance(own.stop_strings, str) else own.stop_strings or []
        self._family.model.generation_config = steered_from_outside(own)
        if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            use_onednn(self._family.model)
        model.tokenizer("a")  # sets itself once, which no two threads may do
        self._bound = position_bound(self._family.decoder.config)
        self._most_characters = self._bound and self._bound * max(map(len, model.tokenizer.get_vocab()))
        models = [Path(str(named)).parent for named in (spec.adapter, spec.backbone) if named]
        saved = [] if contexts.folder is None else [contexts.folder, real_path(contexts.folder)]
        self._places = [f"{place}/" for place in (*saved, Path.cwd(), *models) if place.name]
        self._line, self._closed = Line(), False
        self._opening: Job | None = None
        self._stepped = self._patience = 0.0
        self.first_tokens: deque[float] = deque(maxlen=1000)
        self._begin()

    @property
    def sees_images(self) -> bool:
        """Return whether pictures may be shown to the model."""
        return self._family.sees_images

    def submit(self, job: Job) -> None:
        """Put a job that is ready into the line."""
        self.works()
        self._line.put(job)

    def works(self) -> bool:
        """Return whether the thread that answers lives; where it does not, another one takes its place."""
        if self._thread.is_alive() or self._closed:
            return True
        self._replace()
        return False

    def close(self) -> None:
        """Answer what is in the line, then end."""
        self._closed = True
        self._line.put(None)
        self._thread.join()

    def prepare(self, request: ChatRequest) -> Prepared:
        """Read what a request holds, in any thread, before it has its place in the line; raises ``refusal``."""
        try:
            characters, most = sum(len(str(each["content"])) for each in request.messages), self._most_characters
            if most is not None and characters > most:
                words = f"{characters:,} characters, more than the {self._bound:,} positions of the model can hold"
                raise RefusedError(400, f"the prompt has {words}; send less", TOO_LONG)
            if (asked := request.asked) is not None and asked.name is not None:
                self.contexts.saved(asked.name)
            model = SubTokenModel.around(self._model.backbone, self.compression(request))
            ready = read_for_pass(model, request, self.limits)
            if (needed := self._most_bytes(request, ready.tokens)) > self.limits.memory:
                words = f"the prompt and its answer need {needed:,} bytes, and answers have {self.limits.memory:,} here"
                raise RefusedError(413, f"{words}; send a shorter prompt, or ask for fewer tokens")
        except BaseException as error:
            raise self.refusal(error) from None
        return ready

    def compression(self, request: ChatRequest) -> Compression:
        """Return the compression of a request."""
        if request.eviction is None and request.eviction_keep is None:
            return self._model.compression
        name = self._spec.eviction if request.eviction is None else request.eviction
        chosen: dict[str, Any] = {"eviction": name, "eviction_keep": request.eviction_keep, "written": "argument"}
        if name in (None, "none"):
            chosen |= {"eviction": None, "eviction_every": None, "scope": None}
        if name != self._spec.eviction:
            chosen |= {"eviction_options": {}}
        compression = replace(self._spec, **chosen).compression(self._model.compression.round_up)
        compression.check(self._family)
        return compression

    def refusal(self, error: BaseException) -> RefusedError:
        """Return what a request is told of what went wrong."""
        if isinstance(error, ValueError):  # anew, without frames and what they hold
            return RefusedError(getattr(error, "status", 400), self._said(str(error)), getattr(error, "code", None))
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            torch.cuda.empty_cache()
            return RefusedError(503, "there is not enough memory for this prompt; send a shorter one")
        _log.error("a request failed", exc_info=error)
        return RefusedError(500, BROKEN)

    def _said(self, words: str) -> str:
        for place in self._places:
            words = words.replace(place, "")
        return _FOLDERS.sub("", words)

    @property
    def running(self) -> int:
        """Answers that are made now."""
        return len(self._running.rows)

    def _begin(self) -> None:
        self._running = RunningRows(self._model.backbone, self._ended)
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)
        self._thread.start()

    def _replace(self) -> None:
        self.replaced += 1
        jobs, opening = [row.job for row in self._running.rows], self._opening
        self._refuse(jobs if opening is None else [*jobs, opening], RefusedError(500, BROKEN))
        self._opening = None
        self._begin()

    def _run(self) -> None:
        """Answer jobs; nothing that one of them raises ends the thread, and where it ends all the same, begin anew."""
        running = self._running
        try:
            while self._thread is threading.current_thread() and self._turn(running):
                pass
        except BaseException:
            _log.exception("the thread that answers ended; another one takes its place")
            self._replace()

    def _turn(self, running: RunningRows) -> bool:
        """Let jobs begin that have room, then take a step; False where nothing is left to answer."""
        begins = time.monotonic() + self._patience
        while len(running.rows) < self.limits.batch:
            job = self._line.first(waits=not running.rows)
            if job is None:
                break
            if not self._fits(job, running.rows):
                self._line.put_back(job)
                break
            self._open(job, running)
            if self._running is not running:
                return False
            if running.rows and time.monotonic() >= begins:
                break
        if not running.rows:
            return not self._line.ended
        with serving(self._family):
            self._step(running)
        return True

    def _step(self, running: RunningRows) -> None:
        begun = time.monotonic()
        running.step()
        self._stepped = time.monotonic()
        self._patience = max(PATIENCE, self._stepped - begun)

    def _fits(self, job: Job, rows: Sequence[Row]) -> bool:
        """Return whether a job's uncompressed prompt and answer have room in memory beside the running rows."""
        held = sum(row.own_bytes + row.most * self._family.shape.token_bytes for row in rows)
        return not rows or held + self._most_bytes(job.request, job.ready.tokens) <= self.limits.memory

    def _most_bytes(self, request: ChatRequest, tokens: int) -> int:
        return (tokens + self._room(request, tokens)) * self._family.shape.token_bytes

    def _open(self, job: Job, running: RunningRows) -> None:
        """Let the answer to a job begin; what goes wrong is told to it alone."""
        self._opening = job
        try:
            if job.is_over():
                raise time_over("it was still waiting")
            with noted() as notes:
                row, logits_1V = self._opened(job, running)
            row.notes += [self._said(note) for note in (*job.ready.notes, *notes)]
            self.first_tokens.append(time.monotonic() - job.came)
            running.join(row, logits_1V)
        except BaseException as error:
            self._refuse([job], self.refusal(error))
        self._opening = None

    def _ended(self, row: Row, error: BaseException | None) -> None:
        """Tell a row's end, or why it failed."""
        try:
            if error is not None:
                raise error
            if not row.finish:
                raise time_over(f"{row.new_tokens} tokens were made")
            if not row.job.answered:
                row.job.tell(row.answer(self._family.shape.token_bytes))
        except BaseException as failure:
            self._refuse([row.job], self.refusal(failure))

    def _refuse(self, jobs: Sequence[Job], refusal: RefusedError) -> None:
        for job in jobs:
            if not job.answered:
                try:
                    job.tell(refusal)
                except BaseException:  # nobody hears it
                    _log.exception("an answer was lost")

    def _opened(self, job: Job, running: RunningRows) -> tuple[Row, Tensor]:
        """Run a job's prompt, in chunks between which running answers go on; its row, and its first logits [1, V]."""
        model = SubTokenModel.around(self._model.backbone, self.compression(job.request))
        if running.rows and job.ready.tokens > CHUNK:
            model = SubTokenModel.around(model.backbone, self._in_chunks(model.compression))

        def between() -> None:
            if job.is_over():
                raise time_over("its prompt was being read")
            if running.rows and time.monotonic() - self._stepped >= self._patience:
                self._step(running)

        opens = self._whole if job.request.asked is None else self._question
        with serving(self._family):
            return opens(model, job, between)

    def _in_chunks(self, compression: Compression) -> Compression:
        """Return a compression that runs prompts in chunks, where it can: what looks at a whole prompt cannot."""
        method, says = compression.eviction, compression.said
        rows = 1 if method is None else method.observing_rows
        twice = isinstance(self._model.backbone.reducer, ScoredContext)
        twice = twice or (method is not None and "second_pass" in method.needs)
        divides = says["divides"] and compression.threshold is None
        if compression.prefill_chunk is not None or rows is None or twice or divides:
            return compression
        return replace(compression, prefill_chunk=max(CHUNK, rows))

    def _row(self, job: Job, ids_1N: Tensor, prompt: tuple[int, int, int], cache: PackedCache, goes_on: bool) -> Row:
        """Return the row of a prompt of so many tokens, those of them that were there, and its uncompressed bytes."""
        request, (tokens, cached, dense) = job.request, prompt
        stops, goes_on = [*request.stops, *self._stops], request.goes_on or goes_on
        stream = AnswerStream(self._model.tokenizer, job.tell, stops=stops, goes_on=goes_on)
        stream.put(torch.empty(0))  # the prompt is not handed on
        most = self._room(request, tokens)
        cache.reserve(most - 1 + (0 if request.asked is None else ids_1N.shape[1]))
        choice = TokenChoice(self._family.model, request.settings, ids_1N, most, request.seed)
        return Row(job, tokens, cached, most, stream, cache, choice, dense)

    def _whole(self, model: SubTokenModel, job: Job, between: Callable[[], None]) -> tuple[Row, Tensor]:
        family, given = self._family, {**on_device(job.ready.inputs, model.device), **job.request.settings}
        call = GenerateCall.read(given, family.model)
        named = {name: given.get(name) for name in ("regions", *IMAGE_INPUTS)}
        batch = batch_from_inputs(family, call.ids_BN, call.visible, named, None)
        cache, tokens = PackedCache(family.shape.num_layers), call.ids_BN.shape[1]
        filled = prefill(model.backbone, batch, cache, model.compression, between)
        warn_of_emptied(model.backbone, model.compression, batch, filled.plan)
        drops = model.compression.eviction is not None or model.backbone.active_routing is not None
        if drops and not model.compression.in_scope(batch.regions_BN).any():
            words = "nothing was compressed: no visual token and no context, only a question; send more text"
            warnings.warn(words, SubTokenWarning, stacklevel=2)
        row = self._row(job, call.ids_BN, (tokens, 0, tokens * family.shape.token_bytes), cache, False)
        row.own_bytes = sum(layer.payload_bytes + layer.index_bytes for layer in cache.layers)
        return row, filled.logits_BV

    def _question(self, model: SubTokenModel, job: Job, between: Callable[[], None]) -> tuple[Row, Tensor]:
        """Ask about one context, which is kept."""
        context, found = self._context(model, job, between)
        ids = job.ready.question or asked_ids(context.frames[0], self._family, job.request)
        held, ids_1q = context.packed.prompt_length, torch.tensor([ids], device=model.device)
        cache, tokens = context.packed.branch(), held + len(ids)
        dense = context.report.dense_bytes + len(ids) * self._family.shape.token_bytes
        chunk, unpadded = model.compression.prefill_chunk, torch.zeros_like(ids_1q, dtype=torch.bool)
        row = self._row(job, ids_1q, (tokens, held if found else 0, dense), cache, context.goes_on)
        return row, append_rest(model.backbone, ids_1q, unpadded, cache, chunk, between)

    def _context(self, model: SubTokenModel, job: Job, between: Callable[[], None]) -> tuple[CompressedContext, bool]:
        backbone, compression, asked = model.backbone, model.compression, job.request.asked
        assert asked is not None
        how = (json.dumps(settings_record(compression)), job.request.owner)
        if asked.name is not None:
            path = self.contexts.saved(asked.name)
            seen, load = path.stat(), partial(CompressedContext.load, path, backbone, compression)
            context, found = self.contexts.take((asked.name, seen.st_mtime_ns, seen.st_size, how), load)
            if (held := len(context.frames)) != 1:
                raise ValueError(f"the saved context {asked.name!r} holds {held} contexts; a request asks one")
            return context, found
        batch = on_device(job.ready.batch, model.device)
        assert batch is not None
        compress = partial(CompressedContext.of, backbone, compression, batch, job.ready.frames, between=between)
        return self.contexts.take((*batch.record_ids, asked.by_system, asked.system, how), compress)

    def _room(self, request: ChatRequest, tokens: int) -> int:
        most, bound = request.max_new_tokens or self.limits.max_new_tokens, self._bound
        if bound is not None and tokens >= bound:
            words = f"{tokens:,} tokens, and the model was made for {bound:,} together with the answer"
            raise RefusedError(400, f"the prompt has {words}; send less", TOO_LONG)
        return most if bound is None else min(most, bound - tokens)


def time_over(words: str) -> RefusedError:
    """Return what a request is told whose time is over."""
    return RefusedError(503, f"the time for one request is over; {words}: ask for less, or again later")
