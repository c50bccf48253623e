"""RULER's tasks that need no other text, made on the spot and by a seed: no files, no network. See ``ruler_texts``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from subtoken_train.errors import MAX_COUNT, MAX_TOKENS
from subtoken_train.evaluation.metrics.string_match import RulerMatch
from subtoken_train.evaluation.tasks.long_context import QUESTIONS, LongContext
from subtoken_train.evaluation.tasks.ruler import NEW_TOKENS, family, parts_of, ruler_sample
from subtoken_train.evaluation.tasks.ruler_texts import MAKERS, Text
from subtoken_train.evaluation.tasks.task import Sample
from subtoken_train.evaluation.tasks.task_tokenizer import not_at_hand, read_tokenizer

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
    ranges: ClassVar = {"length": (1, MAX_TOKENS), "samples_per_task": (1, MAX_COUNT)}
    where = "It needs no files: its texts are made when it is asked, by its options length, tokenizer and seed"

    @property
    def expected_rows(self) -> int:
        """``samples_per_task`` of each of ``tasks``."""
        return self.samples_per_task * len(self.tasks)

    def check_options(self) -> None:
        """Refuse a ``length`` that is too short for one of the samples; only the smallest texts are made."""
        if not_at_hand(self.tokenizer) is not None:
            return  # ``check_requirements`` says it: it may be there when the task runs
        count = _counter(self.tokenizer)
        for task in self.tasks:
            for number in range(self.samples_per_task):
                _check_room(task, self._maker(task, number), self._budget(task), count)

    def check_requirements(self) -> None:
        """A tokenizer that is on the Hub must be at hand."""
        if (error := not_at_hand(self.tokenizer)) is not None:
            raise error

    def _budget(self, task: str) -> int:
        """What is left of ``length`` for a prompt."""
        return self.length - NEW_TOKENS[family(task)]

    def samples(self) -> list[Sample]:
        """Task by task; a ``length`` that is too short for one is refused."""
        count = _counter(self.tokenizer)
        return [sample for task in self.tasks for sample in self._task_samples(task, count)]

    def _task_samples(self, task: str, count: Callable[[str], int]) -> list[Sample]:
        samples, size = [], 0
        for number in range(self.samples_per_task):
            make = self._maker(task, number)
            size = _largest_size(task, make, size, self._budget(task), count)
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
        return _length(make(size), count) <= budget

    _check_room(task, make, budget, count)
    low, most = MAKERS[task].smallest, MAKERS[task].largest
    step, high = 1, max(near, low)
    if fits(high):
        low = high
        while (most is None or low < most) and fits(high := min(low + step, most or low + step)):
            low, step = high, 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _check_room(task: str, make: Callable[[int], Text], budget: int, count: Callable[[str], int]) -> None:
    """Raise a worded ``ValueError`` where a sample's smallest text is longer than ``budget``."""
    if (least := _length(make(MAKERS[task].smallest), count)) > budget:
        raise ValueError(
            f"length leaves {budget} tokens or words for a prompt of {task}, and its shortest text has {least}; "
            f"raise length to {least + NEW_TOKENS[family(task)]} or more, or leave {task} out of tasks"
        )


def _length(text: Text, count: Callable[[str], int]) -> int:
    return count(text.context + text.rest)


def _counter(tokenizer: str | None) -> Callable[[str], int]:
    if tokenizer is None:
        return lambda text: len(text.split())
    loaded = read_tokenizer(tokenizer)
    return lambda text: len(loaded(text, add_special_tokens=False, verbose=False)["input_ids"])
