"""Key-value recall over English: the embedded language model's world.

The context states facts among English sentences ("Code baran amber falcon."); the query region names some ("Codes of
baran, calek?") and the answer restates them in order. A code is an adjective and a noun, adjectives all different
within a sample (else a small model recalls 80 % of 24 facts). All is a pure function of the random generator.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from subtoken_train.datasets.english import SPLITS, documents
from subtoken_train.datasets.text_batches import TextSample
from subtoken_train.errors import check_word, refuse

NAMES = tuple(
    first + last
    for first in ("bar", "cal", "dor", "fen", "gil", "han", "jor", "kel", "lom", "mar", "nor", "pol")
    for last in ("an", "ek", "in", "os", "ul", "ya", "en", "ir")
)
_ADJECTIVES = (
    "amber azure bitter bold brave bright broken calm clever cold crimson curious dark dusty eager early faint fancy "
    "gentle giant golden grand happy hidden humble icy jolly keen late lazy loyal lucky mellow misty noble pale proud "
    "quick quiet rapid royal rusty shiny silent silver sleepy tiny wild"
)
_NOUNS = (
    "badger beaver bison camel cobra condor crane donkey dragon eagle falcon ferret finch gecko gibbon hamster hare "
    "heron hornet hyena ibis jackal jaguar koala lemur leopard lion lizard lynx magpie marten moose newt ocelot otter "
    "owl panda parrot pigeon puffin rabbit raven salmon spider swan tiger walrus weasel"
)
ADJECTIVES, NOUNS = tuple(_ADJECTIVES.split()), tuple(_NOUNS.split())
_FACT, _QUESTION, _ANSWER = " Code {} {}.", "\nCodes of {}?", " {} {}."
_STATED = re.compile(r"(\w+) (\w+ \w+)\.")


def check_num_facts(num_facts: int, num_questions: int) -> None:
    """Refuse more questions than facts, or more facts than there are adjectives."""
    if not 1 <= num_questions <= num_facts <= len(ADJECTIVES):
        given = f"num_questions {num_questions} and num_facts {num_facts}"
        raise ValueError(f"{given}: 1 <= questions <= facts <= {len(ADJECTIVES)}")


@dataclass(frozen=True)
class RecallSample:
    """One sample: its tokens (context, question, answer, EOS included), and the asked names and codes, in order."""

    text: TextSample
    codes: dict[str, str]


class RecallTask:
    """Draws samples for one tokenizer with an EOS; ``context_length`` counts tokens, BOS included."""

    def __init__(self, tokenizer: Any, context_length: int = 512, num_facts: int = 24, num_questions: int = 8) -> None:
        check_num_facts(num_facts, num_questions)
        self.tokenizer, self.context_length = tokenizer, context_length
        self.num_facts, self.num_questions = num_facts, num_questions
        self._prefix = [] if tokenizer.bos_token_id is None else [int(tokenizer.bos_token_id)]

    def sample(self, rng: np.random.Generator, split: str, record_id: str = "recall") -> RecallSample:
        """Draw one sample whose English is of ``split``; a ``ValueError`` if the facts do not fit into the context."""
        names = [NAMES[i] for i in rng.permutation(len(NAMES))[: self.num_facts]]
        adjectives = rng.permutation(len(ADJECTIVES))
        nouns = (NOUNS[rng.integers(len(NOUNS))] for _ in names)
        codes = {name: f"{ADJECTIVES[at]} {noun}" for name, at, noun in zip(names, adjectives, nouns, strict=False)}
        asked = [names[i] for i in rng.permutation(self.num_facts)[: self.num_questions]]
        context = self._context(rng, split, [_FACT.format(*fact) for fact in codes.items()])
        question = self._encode(_QUESTION.format(", ".join(asked)))
        answer = self._encode("".join(_ANSWER.format(name, codes[name]) for name in asked))
        ids = [*context, *question, *answer, int(self.tokenizer.eos_token_id)]
        text = TextSample(ids, self.context_length, len(question), record_id)
        return RecallSample(text, {name: codes[name] for name in asked})

    def _context(self, rng: np.random.Generator, split: str, facts: list[str]) -> list[int]:
        """Make exactly ``context_length`` ids: a run of English with the facts at random ends of its sentences."""
        encoded = self.tokenizer(facts, add_special_tokens=False)["input_ids"]
        room = self.context_length - len(self._prefix) - sum(map(len, encoded))
        refuse((room < 0, f"{self.num_facts} facts do not fit into context_length {self.context_length}; raise it"))
        english, ends = _english(self.tokenizer, split)
        if room >= len(english):
            raise ValueError(f"context_length {self.context_length:,} is longer than the {split} split's English")
        start = int(rng.integers(len(english) - room))
        inner = ends[np.searchsorted(ends, start) : np.searchsorted(ends, start + room)] - start
        cuts = np.sort(rng.choice(np.append(inner, [0, room]), len(facts)))
        context = list(self._prefix)
        for fact, begin, end in zip(encoded, [0, *cuts[:-1]], cuts, strict=True):
            context += [*english[start + begin : start + end].tolist(), *fact]
        return [*context, *english[start + cuts[-1] : start + room].tolist()]

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


class RecallRecords(Dataset[RecallSample]):
    """``count`` samples, at least one, of a split; sample ``i`` is a pure function of (seed, split, i)."""

    def __init__(self, task: RecallTask, split: str, count: int, seed: int = 0) -> None:
        check_word("split", split, SPLITS)
        refuse((count < 1, f"{count} recall samples; at least 1 is needed"))
        self.task, self.split, self.count, self.seed = task, split, count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> RecallSample:
        if not 0 <= index < self.count:
            raise IndexError(index)
        rng = np.random.default_rng([self.seed, SPLITS.index(self.split), index])
        return self.task.sample(rng, self.split, f"{self.split}-{index:06d}")


def recall_accuracy(answer: str, codes: dict[str, str]) -> float:
    """Return the share of asked names whose code an answer states exactly; a name's first statement counts."""
    stated: dict[str, str] = {}
    for name, code in _STATED.findall(answer):
        stated.setdefault(name, code)
    return sum(stated.get(name) == code for name, code in codes.items()) / len(codes)


@lru_cache(maxsize=8)
def _english(tokenizer: Any, split: str) -> tuple[Any, Any]:
    """Return the ids of a split's English, int64 [tokens], and the positions right after its sentences, ascending."""
    sentences = [s for text in documents(split) for s in re.split(r"(?<=\.)(?=\s)", "\n" + text)]
    encoded = [tokenizer(sentence, add_special_tokens=False)["input_ids"] for sentence in sentences]
    return np.concatenate([np.array(ids, np.int64) for ids in encoded]), np.cumsum([*map(len, encoded)])
