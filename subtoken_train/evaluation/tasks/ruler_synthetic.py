"""RULER's tasks that need no other text, made on the spot and by a seed: no files, no network. See ``ruler_texts``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from subtoken_train.evaluation.metrics.string_match import RulerMatch
from subtoken_train.evaluation.tasks.long_context import QUESTIONS, LongContext
from subtoken_train.evaluation.tasks.ruler import NEW_TOKENS, family, parts_of, ruler_sample
from subtoken_train.evaluation.tasks.ruler_texts import MAKERS, Text
from subtoken_train.evaluation.tasks.task import Sample

_SHORT = 4096  # RULER lists words less often below it


@dataclass
class RulerSynthetic(LongContext):
    """Six of RULER's tasks at a given length. Not the published texts: their words are others.

    See ``LongContext`` for ``chat`` and ``question``.

    Attributes:
        tasks: which of the six.
        length: prompt and room for the answer (``NEW_TOKENS``) together, at most; in tokens of ``tokenizer``, or in
            words (what white space separates) without one. A chat template's tokens come on top.
        tokenizer: folder or Hub id; special tokens are not counted.
        samples_per_task: of each task.
        seed: other seeds, other texts.
    """

    tasks: tuple[str, ...] = tuple(MAKERS)
    length: int = 4096
    tokenizer: str | None = None
    samples_per_task: int = 100
    seed: int = 0

    name = "ruler_synthetic"
    modality = "text"
    primary = "string_match"
    scored_by = RulerMatch
    needs_files = False
    allowed: ClassVar = {"tasks": tuple(MAKERS), "question": QUESTIONS}
    where = "It needs no files: its texts are made when it is asked, by its options length, tokenizer and seed"

    @property
    def expected_rows(self) -> int:
        """``samples_per_task`` of each of ``tasks``."""
        return self.samples_per_task * len(self.tasks)

    def samples(self) -> list[Sample]:
        """Task by task; a ``length`` that is too short for one is refused."""
        count = _counter(self.tokenizer)
        return [sample for task in self.tasks for sample in self._task_samples(task, count)]

    def _task_samples(self, task: str, count: Callable[[str], int]) -> list[Sample]:
        budget = self.length - NEW_TOKENS[family(task)]
        samples, size = [], 0
        for number in range(self.samples_per_task):
            make = self._maker(task, number)
            size = _largest_size(task, make, size, budget, count)
            text = make(size)
            parts = text.context, *parts_of(self, text.rest, task)
            samples.append(ruler_sample(self, task, f"{task}-{number}", parts, text.answers))
        return samples

    def _maker(self, task: str, number: int) -> Callable[[int], Text]:
        """The sample's text by its size; the same one for the same size."""
        often = {"often": (6, 1)} if task == "cwe" and self.length < _SHORT else {}
        return lambda size: MAKERS[task].make(Random(f"{self.seed}-{task}-{number}"), size, **often)


def _largest_size(task: str, make: Callable[[int], Text], near: int, budget: int, count: Callable[[str], int]) -> int:
    """The largest size whose text is no longer than ``budget``, found from ``near`` outwards, then by halving."""

    def fits(size: int) -> bool:
        text = make(size)
        return count(text.context + text.rest) <= budget

    low, most = MAKERS[task].smallest, MAKERS[task].largest
    if not fits(low):
        raise ValueError(f"length leaves {budget} tokens or words for a prompt of {task}, which is too short; raise it")
    step, high = 1, max(near, low)
    if fits(high):
        low = high
        while (most is None or low < most) and fits(high := min(low + step, most or low + step)):
            low, step = high, 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _counter(tokenizer: str | None) -> Callable[[str], int]:
    if tokenizer is None:
        return lambda text: len(text.split())
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        raise ValueError(f"tokenizer {tokenizer!r} cannot be loaded ({error}); give a folder or a Hub id") from None
    return lambda text: len(loaded(text, add_special_tokens=False, verbose=False)["input_ids"])
