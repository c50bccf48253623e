"""Facts in words, hidden in plain prose (``Ada moved to Lisbon last spring.``): what a compressed text still knows.

Small language models read such facts where they fail on codes of digits. Texts are a pure function of the seed: prose
with sentences about people at random places, each person and value once. Not a published benchmark: scores compare over
the same options alone.
"""

import csv
import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import ClassVar, NamedTuple

from subtoken_train.datasets.english import documents
from subtoken_train.documents import read_text
from subtoken_train.errors import MAX_COUNT, MAX_SEED
from subtoken_train.evaluation.tasks.ruler import LongContext
from subtoken_train.evaluation.tasks.table import WORDS
from subtoken_train.evaluation.tasks.task import Sample


class Template(NamedTuple):
    """A kind of fact: what the text says, what is asked, how an answer begins, and what may be said."""

    says: str
    asks: str
    begins: str
    values: list[str]


_TEXT = files(__package__).joinpath("word_facts.csv").read_text("utf-8")
TEMPLATES = {
    kind: Template(says, asks, begins, values.split())
    for kind, says, asks, begins, values in list(csv.reader(_TEXT.splitlines()))[1:]
}
"""By the kind of sample."""
PEOPLE: list[str] = WORDS["people"].split()


@dataclass
class WordFacts(LongContext):
    """Contexts of plain prose, with facts in words and a question about each.

    Attributes:
        contexts: how many texts; ``facts`` questions are asked of each.
        words: of a text, facts included, at most.
        haystack: text file whose sentences surround the facts; None: Python's manual.
    """

    contexts: int = 60
    facts: int = 6
    words: int = 900
    haystack: str | None = None
    seed: int = 0

    needs_files: ClassVar[bool] = False
    ranges: ClassVar = {
        "contexts": (1, MAX_COUNT), "facts": (1, len(TEMPLATES)), "words": (150, 5000), "seed": (0, MAX_SEED)
    }  # fmt: skip

    @property
    def expected_rows(self) -> int:
        return self.contexts * self.facts

    def samples(self) -> list[Sample]:
        prose = sentences(self.haystack)
        return [sample for number in range(self.contexts) for sample in self._text(number, prose)]

    def _text(self, number: int, prose: tuple[str, ...]) -> list[Sample]:
        random = Random(f"{self.seed}-{number}")
        kinds, people = random.sample(sorted(TEMPLATES), self.facts), random.sample(PEOPLE, self.facts)
        told = [*zip(kinds, people, [random.choice(TEMPLATES[kind].values) for kind in kinds], strict=True)]
        facts = [TEMPLATES[kind].says.format(name=name, value=value) for kind, name, value in told]
        context = hidden_facts(random, facts, self.words, prose)
        return [self._sample(f"{number}-{place}", context, *fact) for place, fact in enumerate(told)]

    def _sample(self, name: str, context: str, kind: str, person: str, value: str) -> Sample:
        asked, begins = (text.format(name=person) for text in TEMPLATES[kind][1:3])
        question = f"\n\n{asked}" if self.chat else f"\n\nQuestion: {asked}\n"
        parts, tokens = (context, question, "" if self.chat else f"Answer: {begins}"), 24 if self.chat else 8
        return self.put(name, parts, {"answers": [value], "formula": False}, max_new_tokens=tokens, kind=kind)


def hidden_facts(random: Random, facts: list[str], words: int, prose: tuple[str, ...]) -> str:
    """Return a run of sentences of at most so many words in all, facts at random ends of them."""
    found, place = list[str](), random.randrange(len(prose))
    room = words - sum(len(fact.split()) for fact in facts)
    while (room := room - len(prose[place].split())) >= 0:
        found.append(prose[place])
        place = (place + 1) % len(prose)
    for place, fact in zip(sorted(random.sample(range(len(found) + len(facts)), len(facts))), facts, strict=True):
        found.insert(place, fact)
    return " ".join(found)


def sentences(file: str | None) -> tuple[str, ...]:
    """Return the sentences of 3 to 49 words of a text file, or of the embedded English's dev and test splits (None)."""
    texts = [*documents("dev"), *documents("test")] if file is None else [read_text(Path(file))]
    parts = re.split(r"(?<=[.!?])\s+", " ".join(" ".join(texts).split()))
    if not (kept := tuple(part for part in parts if 2 < len(part.split()) < 50)):
        raise ValueError(f"{file} has no sentence of 3 to 49 words to hide facts among; give a text in prose")
    return kept
