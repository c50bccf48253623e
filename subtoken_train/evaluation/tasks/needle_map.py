"""A needle in a haystack (Kamradt, 2023): a number hidden at depths of texts of some lengths, asked for at the end.

Needle, question and the number's score are RULER's (``niah_single``); the report draws a map of every arm. The text
around the needle is RULER's noise, or a file's sentences. Not here: Kamradt's own needle and essays, and his judge.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random
from typing import ClassVar

from subtoken_train.documents import read_text
from subtoken_train.errors import MAX_COUNT, MAX_TOKENS
from subtoken_train.evaluation.tasks.long_context import LongContext, MadeTexts, RulerMatch
from subtoken_train.evaluation.tasks.ruler import (
    NEW_TOKENS,
    NOISE,
    Text,
    hidden_number,
    largest_fitting,
    parts_of,
    ruler_sample,
    token_counter,
)
from subtoken_train.evaluation.tasks.task import Sample

_CELL = re.compile(r"([\d,]+) long, depth ([\d.]+) %")


def kind_of(length: int, depth: float) -> str:
    """Return the kind of the samples of a length and a depth."""
    return f"{length:,} long, depth {100 * depth:.4g} %"


def cell_of(kind: str) -> tuple[str, str] | None:
    """Return length and depth of a sample's kind, in words; None for another task's."""
    found = _CELL.fullmatch(kind)
    return None if found is None else (found[1], f"{found[2]} %")


@dataclass
class NeedleMap(MadeTexts, LongContext, row="needle_map"):
    """A number at every depth of texts of every length; the same numbers are hidden in every cell.

    Attributes:
        lengths: of a prompt and room for its answer together, at most; in tokens of ``tokenizer``, or in words (what
            white space separates) without one. A chat template's tokens come on top.
        depths: shares of the text that stand before the needle, 0 to 1.
        samples_per_cell: needles of every length and depth.
        tokenizer: folder or Hub id; special tokens are not counted.
        haystack: text file whose sentences surround the needle, from a drawn one on, and again from the first; None:
            RULER's five sentences.
    """

    lengths: tuple[int, ...] = (1024, 2048, 4096)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    samples_per_cell: int = 10
    tokenizer: str | None = None
    haystack: str | None = None
    seed: int = 0

    scored_by = RulerMatch
    ranges: ClassVar = {"samples_per_cell": (1, MAX_COUNT), "lengths": (1, MAX_TOKENS), "depths": (0, 1)}
    length_option = "longest"
    where = "It needs no files: its texts are made when it is asked; haystack names a text of yours to hide needles in"

    @property
    def longest(self) -> int:
        """The greatest of ``lengths``."""
        return max(self.lengths)

    @property
    def expected_rows(self) -> int:
        return self.samples_per_cell * len(self.lengths) * len(self.depths)

    def check_lengths(self) -> None:
        sentences, count = self._sentences(), token_counter(self.tokenizer)
        for length, number in product(self.lengths, range(self.samples_per_cell)):
            room, least = length - NEW_TOKENS["niah"], count(self._text(sentences, number, 1, 0.0).whole)
            if least > room:
                raise ValueError(
                    f"length {length} of needle_map leaves {room} tokens or words for a prompt, and the shortest has "
                    f"{least}; raise it to {least + NEW_TOKENS['niah']} or more"
                )

    def samples(self) -> list[Sample]:
        """Make samples length by length, then depth by depth; ids are both and the needle's number."""
        self.check_options()
        sentences, count = self._sentences(), token_counter(self.tokenizer)
        sizes = {
            (length, number): self._size(sentences, number, length, count)
            for length, number in product(self.lengths, range(self.samples_per_cell))
        }
        made = []
        for length, depth, number in product(self.lengths, self.depths, range(self.samples_per_cell)):
            text = self._text(sentences, number, sizes[length, number], depth)
            parts = text.context, *parts_of(self, text.rest, "niah")
            name = f"{length}-{depth:g}-{number}"
            made.append(ruler_sample(self, "niah_single_1", name, parts, text.answers, kind_of(length, depth)))
        return made

    def _size(self, sentences: list[str], number: int, length: int, count: Callable[[str], int]) -> int:
        """Return how many sentences fit; the needle's depth changes a token or two, for which there is room."""
        budget = length - NEW_TOKENS["niah"]

        def fits(size: int) -> bool:
            return all(count(self._text(sentences, number, size, depth).whole) <= budget for depth in self.depths)

        return largest_fitting(fits, length // 30, 1)

    def _sentences(self) -> list[str]:
        if self.haystack is None:
            return [NOISE]
        found = [part for part in re.split(r"(?<=[.!?])\s+", read_text(Path(self.haystack)).strip()) if part]
        if not found:
            raise ValueError(f"haystack {self.haystack} holds no text")
        return [" ".join(each.split()) for each in found]

    def _text(self, sentences: list[str], number: int, size: int, depth: float) -> Text:
        random = Random(f"{self.seed}-needle-{number}")
        first = random.randrange(len(sentences))
        around = [sentences[(first + place) % len(sentences)] for place in range(size)]
        return hidden_number(random, around, round(depth * size))
