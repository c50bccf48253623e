"""Facts in words, hidden in plain prose (``Ada moved to Lisbon last spring.``): what a compressed text still knows.

Small language models read such facts where they fail on codes of digits. Texts are a pure function of the seed: prose
with sentences about people at random places, each person and value once. Not a published benchmark: scores compare over
the same options alone.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import ClassVar, NamedTuple

from subtoken_train.datasets.english import documents
from subtoken_train.documents import read_text
from subtoken_train.errors import MAX_COUNT, MAX_SEED
from subtoken_train.evaluation.metrics.short_answers import ContainsAnswer
from subtoken_train.evaluation.tasks.ruler import LongContext
from subtoken_train.evaluation.tasks.task import Sample


class Template(NamedTuple):
    """A kind of fact: what the text says, what is asked, how an answer begins, and what may be said."""

    says: str
    asks: str
    begins: str
    values: list[str]


_words = str.split
TEMPLATES = {
    "city": Template(
        "{name} moved to {value} last spring.",
        "Where did {name} move last spring?",
        "Last spring {name} moved to",
        _words("Lisbon Oslo Vienna Dublin Prague Athens Madrid Warsaw Helsinki Berlin Cairo Lima"),
    ),
    "instrument": Template(
        "Every evening {name} plays the {value} for an hour.",
        "Which instrument does {name} play every evening?",
        "Every evening {name} plays the",
        _words("violin piano guitar trumpet flute cello drums harp clarinet accordion banjo organ"),
    ),
    "job": Template(
        "{name} has worked as a {value} for ten years.",
        "What is the job of {name}?",
        "{name} has worked as a",
        _words("baker nurse carpenter teacher pilot gardener plumber librarian farmer dentist tailor butcher"),
    ),
    "animal": Template(
        "In the yard behind the house {name} keeps a {value}.",
        "Which animal does {name} keep in the yard?",
        "In the yard behind the house {name} keeps a",
        _words("goat donkey rabbit pony duck goose turkey sheep peacock hedgehog llama pig"),
    ),
    "drink": Template(
        "With breakfast {name} always drinks a glass of {value}.",
        "What does {name} drink with breakfast?",
        "With breakfast {name} always drinks a glass of",
        _words("milk cider lemonade water buttermilk cocoa wine beer juice tea coffee kefir"),
    ),
    "colour": Template(
        "{name} drove to the meeting in a {value} car.",
        "What colour was the car of {name}?",
        "{name} drove to the meeting in a",
        _words("red blue green yellow black white silver orange purple brown pink grey"),
    ),
    "subject": Template(
        "At the university {name} studied {value}.",
        "What did {name} study at the university?",
        "At the university {name} studied",
        _words("chemistry history law medicine physics biology geography music philosophy economics theology geology"),
    ),
    "month": Template(
        "The wedding of {name} took place in {value}.",
        "In which month was the wedding of {name}?",
        "The wedding of {name} took place in",
        _words("January February March April May June July August September October November December"),
    ),
    "fruit": Template(
        "At the market {name} bought a bag of {value}.",
        "What did {name} buy at the market?",
        "At the market {name} bought a bag of",
        _words("apples pears plums cherries onions potatoes lemons grapes carrots walnuts apricots figs"),
    ),
    "sport": Template(
        "On Saturdays {name} goes to the club to practise {value}.",
        "Which sport does {name} practise on Saturdays?",
        "On Saturdays {name} goes to the club to practise",
        _words("tennis boxing rowing fencing judo archery swimming golf hockey volleyball wrestling badminton"),
    ),
}
"""By the kind of sample."""
PEOPLE = _words(
    "Ada Boris Clara Daniel Elena Felix Greta Hugo Irene Jonas Karin Lukas Maria Nils Olga Peter Quentin Rosa Stefan "
    "Tanja Ursula Viktor Wanda Xenia Yusuf Zoe Albert Bertha Conrad Dora Emil Flora"
)


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
    scored_by = ContainsAnswer
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
        values = [random.choice(TEMPLATES[kind].values) for kind in kinds]
        told = [*zip(kinds, people, values, strict=True)]
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
