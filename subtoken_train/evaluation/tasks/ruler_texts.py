"""Texts of the six RULER tasks that need no other text, drawn anew: a pure function of a random generator and a size.

Wording, structure and answers are RULER's (Hsieh et al., COLM 2024; its ``niah.py``, ``variable_tracking.py``,
``common_words_extraction.py``, ``freq_words_extraction.py``). Its words are not: keys and listed words are ours. So
scores compare with others over the same texts, not with published ones.
"""

from __future__ import annotations

import string
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise, product
from random import Random

from subtoken_train.datasets.recall import ADJECTIVES, NAMES, NOUNS

_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
_HIDDEN = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "{kind} afterwards.\n"
)
_ASK = (
    "What is the special magic {kind} for {key} mentioned in the provided text? The special magic {kind} for {key} "
    "mentioned in the provided text is"
)
_TRACK = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
_ASK_TRACK = (  # "assgined" is RULER's
    "Question: Find all variables that are assigned the value {value} in the text above. Answer: According to the "
    "chain(s) of variable assignment in the text above, {count} variables are assgined the value {value}, they are: "
)
_COMMON = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n"
)
_ASK_COMMON = (
    "Question: What are the 10 most common words in the above list? Answer: The top 10 words that appear most often in "
    "the list are:"
)
_CODED = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. "
)
_ASK_CODED = (
    "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
    "appeared words in the above coded text? Answer: According to the coded text above, the three most frequently "
    "appeared words are:"
)
_WORDS = (*ADJECTIVES, *NOUNS, *NAMES, *(name + ending for name, ending in product(NAMES, ("ta", "ro", "mi", "su"))))
_HOPS, _COMMON_WORDS, _CODED_LENGTH, _ZETA_2 = 4, 10, 6, 1.6449340668482264  # the sum of 1 / k^2


@dataclass(frozen=True)
class Text:
    """One sample's text: what may be compressed, what asks, and the expected texts."""

    context: str
    rest: str
    answers: list[str]


def needle_in_noise(random: Random, size: int) -> Text:
    """``niah_single_1``: one number among ``size`` times the same five sentences."""
    return _niah(random, [_NOISE] * size, "number", _word_key)


def needle_in_needles(random: Random, size: int) -> Text:
    """``niah_multikey_2``: one number among ``size`` others of other keys."""
    key = _word_key(random)
    others = [_needle("number", _other(random, key, _word_key), _number(random)) for _ in range(size)]
    return _niah(random, others, "number", lambda _: key)


def uuid_in_uuids(random: Random, size: int) -> Text:
    """``niah_multikey_3``: the same, where keys and values are UUIDs."""
    others = [_needle("uuid", _uuid(random), _uuid(random)) for _ in range(size)]
    return _niah(random, others, "uuid", _uuid)


def variable_tracking(random: Random, size: int) -> Text:
    """``vt``: a value handed from variable to variable, in order, among ``size`` lines of noise; first an example."""
    example = _chain(random, 10, letters=3)
    main = _chain(random, size, letters=5)
    solved = example.context + example.rest + " ".join(example.answers) + "\n\n"
    return Text(solved + main.context, main.rest, main.answers)


def common_words(random: Random, size: int, often: tuple[int, int] = (30, 3)) -> Text:
    """``cwe``: ten words more often than ``size`` others, in a numbered list; an example first.

    Args:
        random: generator.
        size: the others' number, at most what there are words for.
        often: how many times a common and another word is listed.
    """
    example = _numbered(random, 30, (10, 3) if often[0] > 10 else (3, 1))
    main = _numbered(random, size, often)
    solved = example.context + example.rest + " " + _listed(example.answers) + "\n"
    return Text(solved + main.context, main.rest, main.answers)


def frequent_words(random: Random, size: int) -> Text:
    """``fwe``: coded words in about ``size`` places, the k-th as often as 1 / k^2 says; the first is dots: noise."""
    vocabulary = _distinct(random, max(8, size // 20), string.ascii_lowercase, _CODED_LENGTH)
    vocabulary[0] = "..."
    words = [word for k, word in enumerate(vocabulary, 1) for _ in range(int(size / (k * k * _ZETA_2)))]
    random.shuffle(words)
    return Text(f"{_CODED}{' '.join(words)}\n", _ASK_CODED, vocabulary[1:4])


@dataclass(frozen=True)
class Maker:
    """How a task's texts are made.

    Attributes:
        make: of a generator and a size.
        smallest: size below which the task has no single right answer.
        largest: size at which the words run out; None: they do not.
    """

    make: Callable[[Random, int], Text]
    smallest: int
    largest: int | None = None


MAKERS = {
    "niah_single_1": Maker(needle_in_noise, 1),
    "niah_multikey_2": Maker(needle_in_needles, 1),
    "niah_multikey_3": Maker(uuid_in_uuids, 1),
    "vt": Maker(variable_tracking, _HOPS + 1),
    "cwe": Maker(common_words, 10, len(_WORDS) - _COMMON_WORDS),
    "fwe": Maker(frequent_words, 60),
}


def _niah(random: Random, haystack: list[str], kind: str, draw_key: Callable[[Random], str]) -> Text:
    key, value = draw_key(random), _uuid(random) if kind == "uuid" else _number(random)
    place = random.randrange(len(haystack))
    sentences = [*haystack[:place], _needle(kind, key, value), *haystack[place:]]
    context = _HIDDEN.format(kind=kind) + "\n".join(sentences) + "\n"
    return Text(context, _ASK.format(kind=kind, key=key), [value])


def _needle(kind: str, key: str, value: str) -> str:
    return _NEEDLE.format(kind=kind, key=key, value=value)


def _chain(random: Random, size: int, letters: int) -> Text:
    variables = _distinct(random, _HOPS + 1, string.ascii_uppercase, letters)
    value = str(random.randrange(10_000, 100_000))
    links = [f"VAR {variables[0]} = {value}"]
    links += [f"VAR {ours} = VAR {before} " for before, ours in pairwise(variables)]
    lines = [f"{_NOISE}\n"] * size
    for moved, (place, link) in enumerate(zip(sorted(random.sample(range(size), len(links))), links, strict=True)):
        lines.insert(place + moved, link)
    return Text(f"{_TRACK}{' '.join(lines)}\n", _ASK_TRACK.format(value=value, count=len(variables)), variables)


def _numbered(random: Random, size: int, often: tuple[int, int]) -> Text:
    words = random.sample(_WORDS, _COMMON_WORDS + size)
    common, others = words[:_COMMON_WORDS], words[_COMMON_WORDS:]
    listed = common * often[0] + others * often[1]
    random.shuffle(listed)
    return Text(f"{_COMMON}{_listed(listed)}\n", _ASK_COMMON, common)


def _listed(words: list[str]) -> str:
    return " ".join(f"{place}. {word}" for place, word in enumerate(words, 1))


def _distinct(random: Random, count: int, letters: str, length: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(random.choices(letters, k=length))] = None
    return list(found)


def _other(random: Random, key: str, draw: Callable[[Random], str]) -> str:
    while (found := draw(random)) == key:
        pass
    return found


def _word_key(random: Random) -> str:
    return f"{random.choice(ADJECTIVES)}-{random.choice(NOUNS)}"


def _number(random: Random) -> str:
    return str(random.randrange(1_000_000, 10_000_000))


def _uuid(random: Random) -> str:
    return str(uuid.UUID(int=random.getrandbits(128), version=4))
