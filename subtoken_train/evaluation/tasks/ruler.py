"""RULER (Hsieh et al., COLM 2024): 13 long-context tasks from files, or the six that need no other text, made here.

Three forms of files are read: the Hub's Parquet rows (context, question, answer prefix: kvpress's form), RULER's own
``TASK/validation.jsonl`` (as its ``prepare.py`` writes them, older and newer), and what ``ruler_synthetic`` writes.
Without the template (``chat: false``) a prompt is RULER's own text, in which the answer prefix follows the question as
written. In it the user says context and question, and the answer begins with the prefix. Not here: kvpress's reading of
a tokenizer without a template (a line break before the answer prefix).

Made texts are a pure function of a random generator and a size. Their wording, structure and answers are RULER's (its
``niah.py``, ``variable_tracking.py``, ``common_words_extraction.py``, ``freq_words_extraction.py``). Its words are not:
keys and listed words are ours. So scores compare with others over the same texts, not with published ones.
"""

from __future__ import annotations

import re
import string
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise, product
from pathlib import Path
from random import Random
from typing import ClassVar, NamedTuple

from subtoken_train.datasets.recall import ADJECTIVES, NAMES, NOUNS
from subtoken_train.errors import MAX_COUNT, MAX_TOKENS
from subtoken_train.evaluation.tasks.file_rows import FileRow, read_jsonl, task_source, unique_ids
from subtoken_train.evaluation.tasks.long_context import RULER_TASKS, LongContext, MadeTexts, RulerMatch, read_tokenizer
from subtoken_train.evaluation.tasks.table_files import read_split
from subtoken_train.evaluation.tasks.task import Sample

NEW_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
"""Tokens generated, by the first part of a task's name."""
_QUESTIONS = {
    "niah": re.compile(r"What (?:is|are all) the special magic"),
    "vt": re.compile(r"Question: Find all variables that are assigned the value"),
    "cwe": re.compile(r"Question: What are the 10 most common words in the above list\?"),
    "fwe": re.compile(r"Question: Do not provide any explanation\."),
    "qa": re.compile(r"Answer the question based on the given documents\."),
}
_ANSWERS = {"niah": "The special magic", **dict.fromkeys(("vt", "cwe", "fwe", "qa"), "Answer:")}
"""Words that begin the answer prefix, after the question."""


def context_end(text: str, task: str) -> int:
    """Count the characters before a task's question: up to the last place where its fixed words begin.

    A text without them raises a ``ValueError``.
    """
    places = [match.start() for match in _QUESTIONS[family(task)].finditer(text)]
    if not places:
        raise ValueError(f"no question of RULER's task {task} in it")
    return places[-1]


def asked_parts(rest: str, task: str) -> tuple[str, str]:
    """Split what follows a task's context into question and answer prefix; no prefix is a ``ValueError``."""
    place = rest.find(_ANSWERS[family(task)])
    if place < 0:
        raise ValueError(f"no answer prefix ({_ANSWERS[family(task)]} ...) after the question of RULER's task {task}")
    return rest[:place], rest[place:]


def family(task: str) -> str:
    """Return the family of a task: ``niah`` of ``niah_single_1``."""
    return task.partition("_")[0]


@dataclass
class Ruler(LongContext, row="ruler"):
    """RULER at one length; ids are a task's name and the sample's number.

    Attributes:
        length: of the Hub's configuration, in tokens of the tokenizer that it was made with; files in a folder have
            their own. A chat template's tokens come on top.
        rows_per_task: samples of each, in a complete set.
    """

    length: int = 4096
    tasks: tuple[str, ...] = RULER_TASKS
    rows_per_task: int = 500

    scored_by = RulerMatch
    allowed: ClassVar = {"tasks": RULER_TASKS}
    ranges: ClassVar = {"length": (1, MAX_TOKENS), "rows_per_task": (1, MAX_COUNT)}
    length_option = "length"
    where = (
        "hf download simonjegou/ruler --repo-type dataset --include '4096/*' --local-dir DIR; or DIR as "
        "--save_dir of RULER's own scripts/data/prepare.py (https://github.com/NVIDIA/RULER), which leaves "
        "DIR/TASK/validation.jsonl. The task ruler_synthetic needs no files"
    )

    @property
    def expected_rows(self) -> int:
        return self.rows_per_task * len(self.tasks)

    def samples(self) -> list[Sample]:
        source = task_source(self)
        files = [Path(source) / task / "validation.jsonl" for task in self.tasks] if isinstance(source, Path) else []
        if any(path.is_file() for path in files):
            return [sample for path in files for sample in self._read_task(path)]
        rows = read_split(self, "test", self.columns, config=str(self.length))
        numbers: defaultdict[str, Iterator[int]] = defaultdict(count)
        named = [(row, row.values["task"], next(numbers[row.values["task"]])) for row in rows]
        return [self._parquet_sample(row, f"{task}-{number}") for row, task, number in named if task in self.tasks]

    def _parquet_sample(self, row: FileRow, name: str) -> Sample:
        values = row.values
        if not values["answer"]:
            raise ValueError(f"{row.place} has no answer; fetch the file again")
        question, prefix = values["question"], values["answer_prefix"]
        if not prefix and self.compresses_question and not self.chat:
            raise ValueError(
                f"{row.place} has no answer prefix to continue from; ask with question: kept, or chat: true"
            )
        return ruler_sample(self, values["task"], name, (values["context"], question, prefix), values["answer"])

    def _read_task(self, path: Path) -> list[Sample]:
        task = path.parent.name
        rows = read_jsonl(path, ("index", "input", "outputs"))
        unique_ids((f"{task}-{row.values['index']}", row.place) for row in rows)
        samples = []
        for row in rows:
            text, answers = row.values["input"], row.values["outputs"]
            if not isinstance(text, str) or not isinstance(answers, list) or not answers:
                raise ValueError(f"{row.place}: input must be a text and outputs a list of texts, at least one")
            try:
                end = context_end(text, task)
                apart = row.values.get("answer_prefix")  # newer files keep the prefix apart
                question, prefix = (text[end:], apart) if apart else parts_of(self, text[end:], task)
            except ValueError as error:
                raise ValueError(f"{row.place}: {error}; is this file of that task?") from None
            parts = text[:end], question, prefix
            samples.append(ruler_sample(self, task, f"{task}-{row.values['index']}", parts, [str(a) for a in answers]))
        return samples


def parts_of(asker: LongContext, rest: str, task: str) -> tuple[str, str]:
    """Return question and answer prefix, as ``asked_parts``; where nothing asks for them apart, all is question."""
    return asked_parts(rest, task) if asker.chat or asker.compresses_question else (rest, "")


def ruler_sample(
    asker: LongContext,
    task: str,
    name: str,
    parts: tuple[str, str, str],
    answers: Sequence[str],
    kind: str | None = None,
) -> Sample:
    """Return a sample of a task from its context, question and answer prefix; its kind is the task if not given."""
    context, question, prefix = parts
    return Sample(
        id=name,
        prompt=context + question + prefix,
        reference={"task": task, "answers": list(answers)},
        context_characters=len(context) + (len(question) if asker.compresses_question else 0),
        max_new_tokens=NEW_TOKENS[family(task)],
        kind=kind or task,
        chat=asker.chat,
        prefix_characters=len(prefix) if asker.chat else None,
    )


NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
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

    @property
    def whole(self) -> str:
        """Both parts."""
        return self.context + self.rest


def needle_in_noise(random: Random, size: int) -> Text:
    """Make ``niah_single_1``: one number among ``size`` times the same five sentences."""
    return _niah(random, [NOISE] * size, "number", _word_key)


def needle_in_needles(random: Random, size: int) -> Text:
    """Make ``niah_multikey_2``: one number among ``size`` others of other keys."""
    key = _word_key(random)
    others = [_NEEDLE.format(kind="number", key=_other(random, key), value=_number(random)) for _ in range(size)]
    return _niah(random, others, "number", lambda _: key)


def uuid_in_uuids(random: Random, size: int) -> Text:
    """Make ``niah_multikey_3``: the same, where keys and values are UUIDs."""
    others = [_NEEDLE.format(kind="uuid", key=_uuid(random), value=_uuid(random)) for _ in range(size)]
    return _niah(random, others, "uuid", _uuid)


def variable_tracking(random: Random, size: int) -> Text:
    """Make ``vt``: a value handed from variable to variable among ``size`` lines of noise; first an example."""
    example = _chain(random, 10, letters=3)
    main = _chain(random, size, letters=5)
    solved = example.context + example.rest + " ".join(example.answers) + "\n\n"
    return Text(solved + main.context, main.rest, main.answers)


def common_words(random: Random, size: int, often: tuple[int, int] = (30, 3)) -> Text:
    """Make ``cwe``: ten words more often than ``size`` others, in a numbered list; an example first.

    ``often`` says how many times a common and another word is listed.
    """
    example = _numbered(random, 30, (10, 3) if often[0] > 10 else (3, 1))
    main = _numbered(random, size, often)
    solved = example.context + example.rest + " " + _listed(example.answers) + "\n"
    return Text(solved + main.context, main.rest, main.answers)


def frequent_words(random: Random, size: int) -> Text:
    """Make ``fwe``: coded words in about ``size`` places, the k-th as often as 1 / k^2 says; the first is noise."""
    vocabulary = _distinct(random, max(8, size // 20), string.ascii_lowercase, _CODED_LENGTH)
    vocabulary[0] = "..."
    words = [word for k, word in enumerate(vocabulary, 1) for _ in range(int(size / (k * k * _ZETA_2)))]
    random.shuffle(words)
    return Text(f"{_CODED}{' '.join(words)}\n", _ASK_CODED, vocabulary[1:4])


class Maker(NamedTuple):
    """A task's texts by their size: below ``smallest`` it has no single answer, at ``largest`` words run out."""

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


def hidden_number(random: Random, haystack: Sequence[str], place: int) -> Text:
    """Hide a number with a drawn key before the sentence at a place."""
    return _hidden(haystack, place, "number", _word_key(random), _number(random))


def _niah(random: Random, haystack: list[str], kind: str, draw_key: Callable[[Random], str]) -> Text:
    key, value = draw_key(random), _uuid(random) if kind == "uuid" else _number(random)
    return _hidden(haystack, random.randrange(len(haystack)), kind, key, value)


def _hidden(haystack: Sequence[str], place: int, kind: str, key: str, value: str) -> Text:
    sentences = [*haystack[:place], _NEEDLE.format(kind=kind, key=key, value=value), *haystack[place:]]
    context = _HIDDEN.format(kind=kind) + "\n".join(sentences) + "\n"
    return Text(context, _ASK.format(kind=kind, key=key), [value])


def _chain(random: Random, size: int, letters: int) -> Text:
    variables = _distinct(random, _HOPS + 1, string.ascii_uppercase, letters)
    value = str(random.randrange(10_000, 100_000))
    links = [f"VAR {variables[0]} = {value}"]
    links += [f"VAR {ours} = VAR {before} " for before, ours in pairwise(variables)]
    lines = [f"{NOISE}\n"] * size
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


def _other(random: Random, key: str) -> str:
    while (found := _word_key(random)) == key:
        pass
    return found


def _word_key(random: Random) -> str:
    return f"{random.choice(ADJECTIVES)}-{random.choice(NOUNS)}"


def _number(random: Random) -> str:
    return str(random.randrange(1_000_000, 10_000_000))


def _uuid(random: Random) -> str:
    return str(uuid.UUID(int=random.getrandbits(128), version=4))


@dataclass
class RulerSynthetic(MadeTexts, LongContext, row="ruler_synthetic"):
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

    scored_by = RulerMatch
    allowed: ClassVar = {"tasks": tuple(MAKERS)}
    ranges: ClassVar = {"length": (1, MAX_TOKENS), "samples_per_task": (1, MAX_COUNT)}
    length_option = "length"
    where = "It needs no files: its texts are made when it is asked, by its options length, tokenizer and seed"

    @property
    def expected_rows(self) -> int:
        return self.samples_per_task * len(self.tasks)

    def check_lengths(self) -> None:
        count = token_counter(self.tokenizer)
        for task in self.tasks:
            for number in range(self.samples_per_task):
                self._check_room(task, self._maker(task, number), count)

    def samples(self) -> list[Sample]:
        count = token_counter(self.tokenizer)
        return [sample for task in self.tasks for sample in self._task_samples(task, count)]

    def _task_samples(self, task: str, count: Callable[[str], int]) -> list[Sample]:
        samples, size, maker = [], 0, MAKERS[task]
        budget = self.length - NEW_TOKENS[family(task)]
        for number in range(self.samples_per_task):
            make = self._maker(task, number)
            self._check_room(task, make, count)

            def fits(size: int, make: Callable[[int], Text] = make) -> bool:
                return count(make(size).whole) <= budget

            size = largest_fitting(fits, size, maker.smallest, maker.largest)
            text = make(size)
            parts = text.context, *parts_of(self, text.rest, task)
            samples.append(ruler_sample(self, task, f"{task}-{number}", parts, text.answers))
        return samples

    def _maker(self, task: str, number: int) -> Callable[[int], Text]:
        """Return the sample's text by its size; the same one for the same size. RULER lists fewer words below 4,096."""
        often = {"often": (6, 1)} if task == "cwe" and self.length < 4096 else {}
        return lambda size: MAKERS[task].make(Random(f"{self.seed}-{task}-{number}"), size, **often)

    def _check_room(self, task: str, make: Callable[[int], Text], count: Callable[[str], int]) -> None:
        room, answer = self.length - NEW_TOKENS[family(task)], NEW_TOKENS[family(task)]
        if (least := count(make(MAKERS[task].smallest).whole)) > room:
            raise ValueError(
                f"length leaves {room} tokens or words for a prompt of {task}, and its shortest text has {least}; "
                f"raise length to {least + answer} or more, or leave {task} out of tasks"
            )


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
