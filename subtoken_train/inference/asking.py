"""Questions about a context that is compressed once: ``ask``, and the cache that it leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar, cast

from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.inference.compressed_context import CompressedContext
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.context_batches import context_batches
from subtoken_train.inference.generation import serving
from subtoken_train.inference.last_prompt import LastPrompt
from subtoken_train.inference.questions_given import read_contexts, read_questions

ANSWER_TOKENS = 64
"""Of an answer, unless it is told."""
Asked = TypeVar("Asked", list[str], list[list[str]])
"""Questions about one context, or a list of them for each of several; answers come in the same form."""


class Asking:
    """The part of ``SubTokenModel`` that compresses contexts before any question is seen.

    Attributes:
        backbone: in evaluation mode.
        compression: eviction and precision.
        last: the prompt that ``generate`` compressed last; None where ``ask`` was called since.
    """

    backbone: CompressedBackbone
    compression: Compression
    last: LastPrompt | None
    _context: CompressedContext | None

    def ask(self, context: Any = None, questions: Asked | None = None, *, max_new_tokens: int = ANSWER_TOKENS) -> Asked:
        """Compress a context once, before any question is seen, and answer many questions about it, greedily.

        Every question is answered as if it were the only one: what it and its answer add is let go. The compressed
        context stays (``cache``) until another one takes its place; ``None`` in its place asks on.

        A language model with a chat template is asked in it, context and question as one turn of the user; without one
        the question follows the context as both are written, so write the line breaks. A model that sees images is
        asked in its own chat format, the images first; all text belongs to the questions.

        Several contexts are compressed in one pass, padded, and answered together, question by question: the same as
        one after another but for rounding.

        Args:
            context: a text, or an image, a video or several of them; with lists of questions a list of such. None: the
                context that was compressed last, or loaded.
            questions: a list; for several contexts a list for each. An empty one compresses and asks nothing.
            max_new_tokens: of an answer.

        Returns:
            An answer for each question, in the form of ``questions``.

        Raises:
            ValueError: an eviction, reducer or router that reads the question; contexts and questions that do not go
                together. The object serves the next call, and the context that was compressed before stays unless the
                new one was compressed.

        Warns:
            SubTokenWarning: context, question and answer take more positions than the model was made for.
        """
        asked = read_questions(questions, max_new_tokens)
        family = self.backbone.family
        if context is not None:
            ready = context_batches(self.backbone, self.compression, read_contexts(family, context, asked))
        with serving(family):
            if context is not None:
                self._context = None  # its memory is free before the next one is read
                self._context = CompressedContext.of(self.backbone, self.compression, *ready)
            asked.check_fits(len(self.cache.frames))
            self.last = None
            answers = self.cache.answers(asked.of_each, max_new_tokens)
        return cast("Asked", answers if asked.nested else answers[0])

    @property
    def cache(self) -> CompressedContext:
        """The context that ``ask`` compressed last, or that ``load_cache`` read; ``cache.save(path)`` writes it.

        Raises:
            ValueError: there is none.
        """
        if self._context is None:
            raise ValueError("no context was compressed yet; ask(context, questions) does so, or load_cache(path)")
        return self._context

    def load_cache(self, path: str | Path) -> CompressedContext:
        """Take a context that ``cache.save`` wrote; ``ask(None, questions)`` goes on with it.

        Raises:
            ValueError: no such file, a damaged or newer one, or one of another backbone, adapter, tokenizer or
                compression.
        """
        self._context = CompressedContext.load(path, self.backbone, self.compression)
        self.last = None
        return self._context
