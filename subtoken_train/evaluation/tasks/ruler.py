"""RULER (Hsieh et al., COLM 2024) from files, and the two ways in which the questions of long contexts may be put.

In a chat (kvpress's way) the template holds the context, then question and answer prefix; raw text is RULER's own. Read
are the Hub's Parquet rows (kvpress's form) and RULER's own ``TASK/validation.jsonl``, older and newer. Not here:
kvpress's reading of a tokenizer without a template (a line break before the answer prefix).
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Literal

from subtoken_train.errors import MAX_COUNT, MAX_TOKENS, at_place, refuse
from subtoken_train.evaluation.metrics.metric import mean_of_tasks
from subtoken_train.evaluation.tasks.files import read_jsonl, read_split, task_source
from subtoken_train.evaluation.tasks.table import WORDS
from subtoken_train.evaluation.tasks.task import Sample, Task


@dataclass
class LongContext(Task):
    """A benchmark whose context may be compressed before the question is read, or with it.

    ``chat``: ask in the tokenizer's chat template; a tokenizer without one is refused. ``question``: ``kept``: read
    after the context, in full; ``compressed``: with it, and the model goes on from the answer prefix.
    """

    chat: bool = field(default=False, kw_only=True)
    question: Literal["kept", "compressed"] = field(default="kept", kw_only=True)

    @property
    def asks(self) -> str:
        return f"{'in the chat template' if self.chat else 'raw text, no chat template'}; question {self.question}"

    @property
    def compresses_question(self) -> bool:
        return self.question == "compressed"

    def put(self, name: str, parts: tuple[str, str, str], reference: dict[str, Any], **others: Any) -> Sample:
        """Return a sample of its context, its question and the beginning of its answer."""
        context, question, prefix = parts
        compressed = len(context) + len(question) * self.compresses_question
        others |= {"chat": self.chat, "prefix_characters": len(prefix) if self.chat else None}
        return Sample(name, "".join(parts), reference, context_characters=compressed, **others)


_WORDS = WORDS["ruler"]
RULER_TASKS: tuple[str, ...] = tuple(_WORDS["tasks"])
_CONTROL = re.compile(r"[\x00-\x1f]")


def ruler_score(prediction: str, task: str, expected: Sequence[str]) -> float:
    """Return an answer's score: any expected text counts in full for ``qa`` tasks, each one alike for the others."""
    text = _CONTROL.sub("\n", prediction.strip()).strip().lower()
    found = [one.lower() in text for one in expected]
    return float(any(found)) if task.startswith("qa") else sum(found) / len(expected)


RulerMatch = mean_of_tasks(
    "string_match", "task", RULER_TASKS, lambda said, of: ruler_score(said, of["task"], of["answers"])
)
"""References hold ``task`` and ``answers``; RULER's rounding of each task's mean is not done here."""
NEW_TOKENS: dict[str, int] = _WORDS["tokens"]
"""Tokens generated, by the first part of a task's name."""
_QUESTIONS = {name: re.compile(words) for name, words in _WORDS["questions"].items()}
_ANSWERS: dict[str, str] = _WORDS["answers"]
"""Words that begin the answer prefix, after the question."""


def context_end(text: str, task: str) -> int:
    """Count the characters before a task's question: up to the last place where its fixed words begin."""
    places = [match.start() for match in _QUESTIONS[family(task)].finditer(text)]
    refuse((not places, f"no question of RULER's task {task} in it"))
    return places[-1]


def asked_parts(rest: str, task: str) -> tuple[str, str]:
    """Split what follows a task's context into question and answer prefix; no prefix is a ``ValueError``."""
    place = rest.find(_ANSWERS[family(task)])
    refuse((place < 0, f"no answer prefix ({_ANSWERS[family(task)]} ...) after the question of RULER's task {task}"))
    return rest[:place], rest[place:]


def family(task: str) -> str:
    """Return the family of a task: ``niah`` of ``niah_single_1``."""
    return task.partition("_")[0]


@dataclass
class Ruler(LongContext):
    """RULER at one length; ids are a task's name and the sample's number.

    Attributes:
        length: of the Hub's configuration, in tokens of the tokenizer that it was made with; files in a folder have
            their own. A chat template's tokens come on top.
        rows_per_task: samples of each, in a complete set.
    """

    length: int = 4096
    tasks: tuple[str, ...] = RULER_TASKS
    rows_per_task: int = 500

    allowed: ClassVar = {"tasks": RULER_TASKS}
    ranges: ClassVar = {"length": (1, MAX_TOKENS), "rows_per_task": (1, MAX_COUNT)}
    length_option = "length"

    @property
    def expected_rows(self) -> int:
        return self.rows_per_task * len(self.tasks)

    def samples(self) -> list[Sample]:
        source = task_source(self)
        files = [Path(source) / task / "validation.jsonl" for task in self.tasks] if isinstance(source, Path) else []
        if any(path.is_file() for path in files):
            return [sample for path in files for sample in self._read_task(path)]
        numbers: defaultdict[str, Iterator[int]] = defaultdict(count)
        samples = []
        for row in read_split(self, "test", self.columns, config=str(self.length)):
            names = ("task", "context", "question", "answer_prefix", "answer")
            task, context, question, prefix, answers = (row.values[name] for name in names)
            number = next(numbers[task])
            if task not in self.tasks:
                continue
            refuse((not answers, f"{row.place} has no answer; fetch the file again"))
            if not prefix and self.compresses_question and not self.chat:
                raise ValueError(f"{row.place} has no answer prefix; ask with question: kept, or chat: true")
            samples.append(ruler_sample(self, task, f"{task}-{number}", (context, question, prefix), answers))
        return samples

    def _read_task(self, path: Path) -> list[Sample]:
        task, samples = path.parent.name, list[Sample]()
        for row in read_jsonl(path, ("index", "input", "outputs")):
            text, answers = row.values["input"], row.values["outputs"]
            if not isinstance(text, str) or not isinstance(answers, list) or not answers:
                raise ValueError(f"{row.place}: input must be a text and outputs a list of texts, at least one")
            with at_place(f"{row.place}: ", "; is this file of that task?"):
                end = context_end(text, task)
                apart = row.values.get("answer_prefix")  # newer files keep the prefix apart
                question, prefix = (text[end:], apart) if apart else parts_of(self, text[end:], task)
            parts = text[:end], question, prefix
            samples.append(ruler_sample(self, task, f"{task}-{row.values['index']}", parts, [str(a) for a in answers]))
        return samples


def parts_of(asker: LongContext, rest: str, task: str) -> tuple[str, str]:
    """Return question and answer prefix, as ``asked_parts``; where nothing asks for them apart, all is question."""
    return asked_parts(rest, task) if asker.chat or asker.compresses_question else (rest, "")


def ruler_sample(
    asker: LongContext, task: str, name: str, parts: tuple[str, str, str], answers: Sequence[str], kind: str = ""
) -> Sample:
    """Return a sample of a task from its context, question and answer prefix; its kind is the task if not given."""
    tokens, reference = NEW_TOKENS[family(task)], {"task": task, "answers": list(answers)}
    return asker.put(name, parts, reference, max_new_tokens=tokens, kind=kind or task)
