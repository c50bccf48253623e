"""Six of RULER's tasks that need no other text, and a map of needles (Kamradt, 2023): texts made here, at their length.

They are a pure function of a random generator and a size. Wording, structure and answers are RULER's; its words are
not, so scores compare over the same texts, not with published ones. A map hides a number at depths of texts of some
lengths, in RULER's noise or a file's sentences. Not here: Kamradt's own needle and essays, and his judge.
"""

import re
import string
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from pathlib import Path
from random import Random
from typing import Any, ClassVar, NamedTuple

from subtoken_train.artifact.hub import check_fetched
from subtoken_train.datasets.recall import ADJECTIVES, NAMES, NOUNS
from subtoken_train.documents import read_text
from subtoken_train.errors import MAX_COUNT, MAX_TOKENS, clipped, refuse
from subtoken_train.evaluation.tasks.ruler import NEW_TOKENS, LongContext, family, parts_of, ruler_sample
from subtoken_train.evaluation.tasks.table import WORDS
from subtoken_train.evaluation.tasks.task import Sample, Task
from subtoken_train.families.backbone_config import is_hub_id, resolve


@lru_cache(maxsize=2)
def read_tokenizer(name: str) -> Any:
    """Load a tokenizer from a folder (that of a shipped model, too) or the Hub; no code that it brings is run."""
    from transformers import AutoTokenizer

    check_fetched(name)
    try:
        return AutoTokenizer.from_pretrained(resolve(name), trust_remote_code=False)
    except Exception as error:  # whatever the readers of broken files raise
        words = clipped(" ".join(str(error).split()) or type(error).__name__, 160)
        raise ValueError(f"tokenizer {name!r} cannot be loaded ({words}); give a folder or a Hub id") from None


class MadeTexts(Task):
    """A task that makes its samples itself, measured by ``tokenizer``; one of the Hub has to be there when it runs."""

    needs_files = False
    tokenizer: str | None

    def check_requirements(self) -> None:
        if self.tokenizer is not None:
            read_tokenizer(self.tokenizer)

    def check_options(self) -> None:
        if self.tokenizer is None or not is_hub_id(self.tokenizer):
            self.check_lengths()

    def check_lengths(self) -> None:
        """Raise a ``ValueError`` where a sample does not fit into the length that is asked for."""


_SAID = WORDS["ruler"]["made"]  # "assgined" is RULER's
NOISE, _NEEDLE = _SAID["noise"], _SAID["needle"]
_WORDS = (*ADJECTIVES, *NOUNS, *NAMES, *(name + ending for name, ending in product(NAMES, ("ta", "ro", "mi", "su"))))
_HOPS, _COMMON_WORDS, _CODED_LENGTH, _ZETA_2 = 4, 10, 6, 1.6449340668482264  # the sum of 1 / k^2


@dataclass(frozen=True)
class Text:
    """One sample's text: what may be compressed, what asks, and the expected texts."""

    context: str
    rest: str
    answers: list[str]

    @property
    def whole(self) -> str:
        """Both parts."""
        return self.context + self.rest


def _hidden(haystack: Sequence[str], place: int, kind: str, key: str, value: str) -> Text:
    sentences = [*haystack[:place], _NEEDLE.format(kind=kind, key=key, value=value), *haystack[place:]]
    context = _SAID["hidden"].format(kind=kind) + "\n".join(sentences) + "\n"
    return Text(context, _SAID["ask"].format(kind=kind, key=key), [value])


def _niah(random: Random, haystack: list[str], kind: str = "number", key: str | None = None) -> Text:
    draw_key, draw = (_word_key, _number) if kind == "number" else (_uuid, _uuid)
    key, value = key or draw_key(random), draw(random)
    return _hidden(haystack, random.randrange(len(haystack)), kind, key, value)


def _among_numbers(random: Random, size: int) -> Text:
    key, others = _word_key(random), list[str]()
    for _ in range(size):
        while (other := _word_key(random)) == key:
            pass
        others.append(_NEEDLE.format(kind="number", key=other, value=_number(random)))
    return _niah(random, others, key=key)


def _among_uuids(random: Random, size: int) -> Text:
    others = [_NEEDLE.format(kind="uuid", key=_uuid(random), value=_uuid(random)) for _ in range(size)]
    return _niah(random, others, "uuid")


def _variable_tracking(random: Random, size: int) -> Text:
    example = _chain(random, 10, letters=3)
    main = _chain(random, size, letters=5)
    solved = example.context + example.rest + " ".join(example.answers) + "\n\n"
    return Text(solved + main.context, main.rest, main.answers)


def common_words(random: Random, size: int, often: tuple[int, int] = (30, 3)) -> Text:
    """Make ``cwe``: ten words more ``often`` than ``size`` others in a numbered list; an example first."""
    example = _numbered(random, 30, (10, 3) if often[0] > 10 else (3, 1))
    main = _numbered(random, size, often)
    solved = example.context + example.rest + " " + _listed(example.answers) + "\n"
    return Text(solved + main.context, main.rest, main.answers)


def _frequent_words(random: Random, size: int) -> Text:
    vocabulary = _distinct(random, max(8, size // 20), string.ascii_lowercase, _CODED_LENGTH)
    vocabulary[0] = "..."
    words = [word for k, word in enumerate(vocabulary, 1) for _ in range(int(size / (k * k * _ZETA_2)))]
    random.shuffle(words)
    return Text(f"{_SAID['coded']}{' '.join(words)}\n", _SAID["ask_coded"], vocabulary[1:4])


class Maker(NamedTuple):
    """A task's texts by their size: below ``smallest`` it has no single answer, at ``largest`` words run out."""

    make: Callable[[Random, int], Text]
    smallest: int
    largest: int | None = None


MAKERS = {
    "niah_single_1": Maker(lambda random, size: _niah(random, [NOISE] * size), 1),
    "niah_multikey_2": Maker(_among_numbers, 1),
    "niah_multikey_3": Maker(_among_uuids, 1),
    "vt": Maker(_variable_tracking, _HOPS + 1),
    "cwe": Maker(common_words, 10, len(_WORDS) - _COMMON_WORDS),
    "fwe": Maker(_frequent_words, 60),
}


def _chain(random: Random, size: int, letters: int) -> Text:
    variables = _distinct(random, _HOPS + 1, string.ascii_uppercase, letters)
    value = str(random.randrange(10_000, 100_000))
    links = [f"VAR {variables[0]} = {value}"]
    links += [f"VAR {ours} = VAR {before} " for before, ours in pairwise(variables)]
    lines = [f"{NOISE}\n"] * size
    for moved, (place, link) in enumerate(zip(sorted(random.sample(range(size), len(links))), links, strict=True)):
        lines.insert(place + moved, link)
    asked = _SAID["ask_track"].format(value=value, count=len(variables))
    return Text(f"{_SAID['track']}{' '.join(lines)}\n", asked, variables)


def _numbered(random: Random, size: int, often: tuple[int, int]) -> Text:
    words = random.sample(_WORDS, _COMMON_WORDS + size)
    common, others = words[:_COMMON_WORDS], words[_COMMON_WORDS:]
    listed = common * often[0] + others * often[1]
    random.shuffle(listed)
    return Text(f"{_SAID['common']}{_listed(listed)}\n", _SAID["ask_common"], common)


def _listed(words: list[str]) -> str:
    return " ".join(f"{place}. {word}" for place, word in enumerate(words, 1))


def _distinct(random: Random, count: int, letters: str, length: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(random.choices(letters, k=length))] = None
    return list(found)


def _word_key(random: Random) -> str:
    return f"{random.choice(ADJECTIVES)}-{random.choice(NOUNS)}"


def _number(random: Random) -> str:
    return str(random.randrange(1_000_000, 10_000_000))


def _uuid(random: Random) -> str:
    return str(uuid.UUID(int=random.getrandbits(128), version=4))


@dataclass
class RulerSynthetic(MadeTexts, LongContext):
    """Six of RULER's tasks at a given length. Not the published texts: their words are others.

    Attributes:
        length: prompt and room for the answer (``NEW_TOKENS``) together, at most; in tokens of ``tokenizer``, or in
            words (what white space separates) without one. A chat template's tokens come on top.
        tokenizer: folder or Hub id; special tokens are not counted.
    """

    tasks: tuple[str, ...] = tuple(MAKERS)
    length: int = 4096
    tokenizer: str | None = None
    samples_per_task: int = 100
    seed: int = 0

    allowed: ClassVar = {"tasks": tuple(MAKERS)}
    ranges: ClassVar = {"length": (1, MAX_TOKENS), "samples_per_task": (1, MAX_COUNT)}
    length_option = "length"

    @property
    def expected_rows(self) -> int:
        return self.samples_per_task * len(self.tasks)

    def check_lengths(self) -> None:
        count = token_counter(self.tokenizer)
        for task, number in product(self.tasks, range(self.samples_per_task)):
            self._check_room(task, self._maker(task, number), count)

    def samples(self) -> list[Sample]:
        count, samples, size = token_counter(self.tokenizer), list[Sample](), 0
        for task, number in product(self.tasks, range(self.samples_per_task)):
            make, budget = self._maker(task, number), self.length - NEW_TOKENS[family(task)]
            self._check_room(task, make, count)

            def fits(size: int, make: Callable[[int], Text] = make, budget: int = budget) -> bool:
                return count(make(size).whole) <= budget

            text = make(largest_fitting(fits, size if number else 0, MAKERS[task].smallest, MAKERS[task].largest))
            parts = text.context, *parts_of(self, text.rest, task)
            samples.append(ruler_sample(self, task, f"{task}-{number}", parts, text.answers))
        return samples

    def _maker(self, task: str, number: int) -> Callable[[int], Text]:
        """Return the sample's text by its size; the same one for the same size. RULER lists fewer words below 4,096."""
        often = {"often": (6, 1)} if task == "cwe" and self.length < 4096 else {}
        return lambda size: MAKERS[task].make(Random(f"{self.seed}-{task}-{number}"), size, **often)

    def _check_room(self, task: str, make: Callable[[int], Text], count: Callable[[str], int]) -> None:
        check_length(self.length, task, count(make(MAKERS[task].smallest).whole), f", or leave {task} out of tasks")


def check_length(length: int, task: str, least: int, otherwise: str = "") -> None:
    """Refuse a length that leaves no room for a task's shortest text of ``least`` tokens or words."""
    answer = NEW_TOKENS[family(task)]
    if least > length - answer:
        leaves = f"length {length} leaves {length - answer} tokens or words for a prompt of {task}, and its shortest"
        raise ValueError(f"{leaves} text has {least}; raise it to {least + answer} or more{otherwise}")


def largest_fitting(fits: Callable[[int], bool], near: int, low: int, most: int | None = None) -> int:
    """Find the largest size that fits, from ``near`` outwards, then by halving; ``low`` does, ``most`` is the end."""
    step, high = 1, max(near, low)
    if fits(high):
        low = high
        while (most is None or low < most) and fits(high := min(low + step, most or low + step)):
            low, step = high, 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def token_counter(tokenizer: str | None) -> Callable[[str], int]:
    """Return what counts a text's tokens, special ones left out; its words without a tokenizer."""
    if tokenizer is None:
        return lambda text: len(text.split())
    loaded = read_tokenizer(tokenizer)
    return lambda text: len(loaded(text, add_special_tokens=False, verbose=False)["input_ids"])


_CELL = re.compile(r"([\d,]+) long, depth ([\d.]+) %")


def kind_of(length: int, depth: float) -> str:
    """Return the kind of the samples of a length and a depth."""
    return f"{length:,} long, depth {100 * depth:.4g} %"


def cell_of(kind: str) -> tuple[str, str] | None:
    """Return length and depth of a sample's kind, in words; None for another task's."""
    found = _CELL.fullmatch(kind)
    return None if found is None else (found[1], f"{found[2]} %")


@dataclass
class NeedleMap(MadeTexts, LongContext):
    """A number at every depth of texts of every length; the same numbers are hidden in every cell.

    Attributes:
        lengths: as ``RulerSynthetic``'s.
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

    ranges: ClassVar = {"samples_per_cell": (1, MAX_COUNT), "lengths": (1, MAX_TOKENS), "depths": (0, 1)}
    length_option = "longest"

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
            check_length(length, "niah", count(self._text(sentences, number, 1, 0.0).whole))

    def samples(self) -> list[Sample]:
        """Make samples length by length, then depth by depth; ids are both and the needle's number."""
        self.check_options()
        sentences, count = self._sentences(), token_counter(self.tokenizer)
        cells = product(self.lengths, range(self.samples_per_cell))
        sizes = {(length, number): self._size(sentences, number, length, count) for length, number in cells}
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
        refuse((not found, f"haystack {self.haystack} holds no text"))
        return [" ".join(each.split()) for each in found]

    def _text(self, sentences: list[str], number: int, size: int, depth: float) -> Text:
        random = Random(f"{self.seed}-needle-{number}")
        first = random.randrange(len(sentences))
        around = [sentences[(first + place) % len(sentences)] for place in range(size)]
        return _hidden(around, round(depth * size), "number", _word_key(random), _number(random))
