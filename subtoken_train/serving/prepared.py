"""A request that is ready for its pass: pictures decoded, texts tokenised, bounds asked; made before it is in line."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from subtoken_train.errors import SubTokenWarning, panics_in_words
from subtoken_train.families.family import Family
from subtoken_train.functional.moving import on_device
from subtoken_train.inference.compressed_context import context_batches
from subtoken_train.inference.model import SubTokenModel
from subtoken_train.inference.prefill import reader_of_question
from subtoken_train.inference.text_prompts import QuestionFrame, further_turns
from subtoken_train.serving.chat_request import ChatRequest, Limits
from subtoken_train.types import Batch

_own = threading.local()
_before: list[Callable[..., Any]] = [warnings.showwarning]
_CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Prepared:
    """All that a pass reads of a request, on the CPU.

    Attributes:
        inputs: of a whole prompt.
        batch, frames: a context to compress.
        question: token ids between that context and the answer.
        notes: what the library warned of.
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
            pictures, variables = request.pictures(limits), request.template or None
            inputs = model.inputs(prompt, pictures, raw=request.raw, chat_template_kwargs=variables)
            return Prepared(on_device(inputs, _CPU), notes=notes)
        if asked.name is not None:
            return Prepared(notes=notes)
        if (reads := reader_of_question(backbone, model.compression)) is not None:
            raise ValueError(f"cache_control compresses before the question is seen, but {reads}; leave it out")
        context = request.pictures(limits) if isinstance(asked.context, list) else asked.context
        assert context is not None
        told: dict[str, Any] = {
            "system": asked.system,
            "by_system": asked.by_system,
            "chat_template_kwargs": request.template,
        }
        batch, frames = context_batches(backbone, model.compression, [context], **told)
        (frame,), after = frames, after_question(backbone.family, request)
        ids = (frame if after is None else replace(frame, after=after)).ids(backbone.family, asked.question)
        return Prepared(batch=on_device(batch, _CPU), frames=frames, question=ids, notes=notes)


def after_question(family: Family, request: ChatRequest) -> str | None:
    """Return what stands between the first question about a context and the answer; None: the end of a turn."""
    followed = request.asked.followed if request.asked is not None else ()
    return further_turns(family, followed, **request.template) if followed else None


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
