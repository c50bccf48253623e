"""Requests answered by one thread, in the order in which they came; those of equal settings that wait share a pass."""

import json
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from subtoken_train.cache.cache import PackedCache
from subtoken_train.documents import check_file_name, real_path
from subtoken_train.families.positions import position_bound
from subtoken_train.functional.moving import on_device
from subtoken_train.inference.answer_stream import AnswerStream
from subtoken_train.inference.arm_spec import ArmSpec
from subtoken_train.inference.batched import end_ids, in_batches
from subtoken_train.inference.cache_report import bytes_by_sample
from subtoken_train.inference.compressed_context import CompressedContext
from subtoken_train.inference.compression import Compression, settings_record
from subtoken_train.inference.generation import ASKED, serving, steered_from_outside
from subtoken_train.inference.model import SubTokenModel
from subtoken_train.inference.prompt_inputs import padded_left
from subtoken_train.serving.chat_request import ChatRequest, Limits, RefusedError
from subtoken_train.serving.line import Answer, Job, Line, Prepared, Row, SharedPass, asked_ids, noted, read_for_pass

_log = logging.getLogger(__name__)
_PADDING = 2000  # characters that are no matter
BROKEN, TOO_LONG = "the server failed at this request; its log says why", "context_length_exceeded"
_FOLDERS = re.compile(r"(?<![\w:/.])/(?:[\w.@+-]+/)+")  # of paths from the root on


class ContextStore:
    """Holds contexts, and lets the least recently used ones go when they take more than a budget.

    One thread takes; others may read the counts. A context larger than the budget is used once and not held. Saved ones
    are ``NAME.safetensors`` of a folder.
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
        model.tokenizer("a")  # sets itself once, which no two threads may do
        self._bound = position_bound(self._family.decoder.config)
        self._most_characters = self._bound and self._bound * max(map(len, model.tokenizer.get_vocab()))
        models = [Path(str(named)).parent for named in (spec.adapter, spec.backbone) if named]
        saved = [] if contexts.folder is None else [contexts.folder, real_path(contexts.folder)]
        self._places = [f"{place}/" for place in (*saved, Path.cwd(), *models) if place.name]
        self._line, self._at_work, self._closed = Line(), list[Job](), False
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
            self._room(request, ready.tokens)
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

    def _begin(self) -> None:
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)
        self._thread.start()

    def _replace(self) -> None:
        self.replaced += 1
        self._refuse(self._at_work, RefusedError(500, BROKEN))
        self._begin()

    def _run(self) -> None:
        """Answer jobs; nothing that one of them raises ends the thread, and where it ends all the same, begin anew."""
        try:
            while self._thread is threading.current_thread() and (job := self._line.first()) is not None:
                self._at_work = [job]
                try:
                    self._at_work += self._company(job)
                    self._answer(self._at_work)
                except BaseException as error:
                    self._refuse(self._at_work, self.refusal(error))
        except BaseException:
            _log.exception("the thread that answers ended; another one takes its place")
            self._replace()

    def _refuse(self, jobs: Sequence[Job], refusal: RefusedError) -> None:
        for job in jobs:
            if not job.answered:
                try:
                    job.tell(refusal)
                except BaseException:  # nobody hears it
                    _log.exception("an answer was lost")

    def _company(self, first: Job) -> list[Job]:
        """Take those that wait and can share a pass with a job; half of what it reads is padding at most.

        A seed's draws are those of one row; prompts of models that see images have shapes of their own; bytes of an
        eviction while decoding are counted of all rows together; and a rotary embedding may turn by the longest row.
        """
        request, found = first.request, list[Job]()
        shown, online = request.asked is None and self.sees_images, self.compression(request).every is not None
        if request.seed is not None or shown or online or self._family.length_dependent:
            return found
        sizes = [_size(request)]
        for job in self._line.waiting():
            size = _size(job.request)
            padded = (len(sizes) + 1) * max(*sizes, size)
            fits = len(sizes) < self.limits.batch and padded <= 2 * (sum(sizes) + size) + _PADDING
            if fits and _kind(request) == _kind(job.request):
                found.append(job)
                sizes.append(size)
        self._line.remove(found)
        return found

    def _answer(self, jobs: Sequence[Job]) -> None:
        """Answer jobs in one pass; where it fails, those that were told nothing yet go on alone."""
        for job in jobs:
            if job.is_over():
                job.tell(time_over("its turn did not come"))
        jobs = [job for job in jobs if not job.answered]
        refusal: RefusedError | None = None
        try:
            if jobs:
                self._pass(jobs)
        except BaseException as error:
            refusal = self.refusal(error)
        for job in (job for job in jobs if not job.answered):
            if job.told or len(jobs) == 1:
                job.tell(refusal or RefusedError(500, BROKEN))
            else:
                self._answer([job])

    def _pass(self, jobs: Sequence[Job]) -> None:
        request, device = jobs[0].request, self._family.device
        model = SubTokenModel.around(self._model.backbone, self.compression(request))
        drawn_apart = torch.random.fork_rng([device] if device.type == "cuda" else [], enabled=request.seed is not None)
        with noted() as notes, drawn_apart:
            if request.seed is not None:
                torch.manual_seed(request.seed)

            def end(row: Row, cache_bytes: int, dense_bytes: int) -> None:
                said = [self._said(note) for note in (*row.job.ready.notes, *notes)]
                counts = row.prompt_tokens, row.cached_tokens, row.new_tokens, cache_bytes, dense_bytes
                late = f"{row.new_tokens} tokens were made"
                row.job.tell(Answer(row.finish, *counts, said) if row.finish else time_over(late))

            (self._ask_whole if request.asked is None else self._ask_context)(model, jobs, end)

    def _row(self, job: Job, tokens: int, cached: int, goes_on: bool = False) -> Row:
        """Return the row of a job whose prompt has so many tokens; its context may be a text to go on with."""
        stops, goes_on = [*job.request.stops, *self._stops], job.request.goes_on or goes_on
        stream = AnswerStream(self._model.tokenizer, job.tell, stops=stops, goes_on=goes_on)
        return Row(job, tokens, cached, self._room(job.request, tokens), stream)

    def _shared(self, rows: Sequence[Row], end: Callable[[Row, int], None]) -> tuple[SharedPass, dict[str, Any]]:
        most, longest = max(row.most for row in rows), max(row.prompt_tokens for row in rows)
        if self._bound is not None and len(rows) > 1 and longest + most > self._bound:
            raise ValueError("a row that ended would go on past the positions of the model")  # so each goes alone
        together = SharedPass(rows, end_ids(self._family), end, 0 if self._family.device.type == "cpu" else ASKED)
        own = {"max_new_tokens": most, "streamer": together, "stopping_criteria": [together]}
        return together, {**rows[0].job.request.settings, **own}

    def _ask_whole(self, model: SubTokenModel, jobs: Sequence[Job], end: Callable[[Row, int, int], None]) -> None:
        prompts = [on_device(job.ready.inputs, model.device) for job in jobs]
        rows = [self._row(job, inputs["input_ids"].shape[1], 0) for job, inputs in zip(jobs, prompts, strict=True)]
        token_bytes = self._family.shape.token_bytes

        def ended(row: Row, place: int) -> None:
            if len(rows) == 1:
                took = model.cache_report()
                end(row, took.total_bytes - took.slack_bytes, took.dense_bytes)
            else:
                assert model.last is not None
                new = row.new_tokens - 1
                stored = bytes_by_sample(model.last.cache)[place]
                end(row, stored + new * token_bytes, (row.prompt_tokens + new) * token_bytes)

        together, settings = self._shared(rows, ended)
        inputs: dict[str, Any] = prompts[0] if len(prompts) == 1 else padded_left(self._family, prompts)
        model.generate(**inputs, **settings)
        together.close()

    def _ask_context(self, model: SubTokenModel, jobs: Sequence[Job], end: Callable[[Row, int, int], None]) -> None:
        """Answer questions about one context, which is kept; its copies of a pass fit into the budget."""
        context, found = self._context(model, jobs[0])
        held, most = context.packed.prompt_length, max(1, self.contexts.budget // context.report.total_bytes)

        def ended(cache: PackedCache, row: Row, place: int) -> None:
            alone = cache.origin_B is not None and len(cache.origin_B) == 1
            appended = row.prompt_tokens - held + row.new_tokens - 1
            took = context.report_of(cache) if alone else context.report_with(appended)
            end(row, took.total_bytes - took.slack_bytes, took.dense_bytes)

        for part in in_batches(jobs, most):
            ids = [job.ready.question or asked_ids(context.frames[0], self._family, job.request) for job in part]
            cached = [held if found or job is not jobs[0] else 0 for job in part]
            parts = zip(part, ids, cached, strict=True)
            rows = [self._row(job, held + len(own), there, context.goes_on) for job, own, there in parts]
            cache = context.branch(len(rows))
            together, settings = self._shared(rows, partial(ended, cache))
            context.generate(ids, cache, **settings)
            together.close()

    def _context(self, model: SubTokenModel, job: Job) -> tuple[CompressedContext, bool]:
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

        def compress() -> CompressedContext:
            with serving(backbone.family):
                return CompressedContext.of(backbone, compression, batch, job.ready.frames)

        return self.contexts.take((*batch.record_ids, asked.by_system, asked.system, how), compress)

    def _room(self, request: ChatRequest, tokens: int) -> int:
        most, bound = request.max_new_tokens or self.limits.max_new_tokens, self._bound
        if bound is not None and tokens >= bound:
            words = f"{tokens:,} tokens, and the model was made for {bound:,} together with the answer"
            raise RefusedError(400, f"the prompt has {words}; send less", TOO_LONG)
        return most if bound is None else min(most, bound - tokens)


def _size(request: ChatRequest) -> int:
    asked = request.asked
    turns = request.messages if asked is None else asked.followed
    return sum(len(str(turn["content"])) for turn in turns) + len("" if asked is None else asked.question)


def _kind(request: ChatRequest) -> tuple[Any, ...]:
    """Return what requests of one pass have in common: compression, sampling, and the context, if any."""
    context: Any = None
    asked = request.asked
    if asked is not None:
        shown = [image.read() for image in asked.context] if isinstance(asked.context, list) else asked.context
        context = (shown, asked.by_system, asked.system, asked.name, request.owner, request.template)
    return request.raw, request.eviction, request.eviction_keep, request.settings, request.seed, context


def time_over(words: str) -> RefusedError:
    """Return what a request is told whose time is over."""
    return RefusedError(503, f"the time for one request is over; {words}: ask for less, or again later")
