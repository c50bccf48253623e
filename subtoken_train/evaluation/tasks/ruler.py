"""RULER (Hsieh et al., COLM 2024): 13 long-context tasks, as texts, or in the chat template as kvpress asks.

Three forms of files are read: the Hub's Parquet rows (context, question, answer prefix: kvpress's form), RULER's own
``TASK/validation.jsonl`` (as its ``prepare.py`` writes them, older and newer), and what ``ruler_synthetic`` writes.
Without the template (``chat: false``) a prompt is RULER's own text, in which the answer prefix follows the question as
written. In it the user says context and question, and the answer begins with the prefix. Not here: kvpress's reading of
a tokenizer without a template (a line break before the answer prefix).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import ClassVar

from subtoken_train.errors import MAX_COUNT, MAX_TOKENS
from subtoken_train.evaluation.metrics.string_match import RULER_TASKS, RulerMatch
from subtoken_train.evaluation.tasks.file_rows import FileRow, task_source, unique_ids
from subtoken_train.evaluation.tasks.long_context import QUESTIONS, LongContext
from subtoken_train.evaluation.tasks.parquet_sets import read_split
from subtoken_train.evaluation.tasks.task import Sample
from subtoken_train.evaluation.tasks.text_files import read_jsonl

FILE = "validation.jsonl"
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
_PARQUET = ("context", "question", "answer_prefix", "answer", "task", "max_new_tokens")


def context_end(text: str, task: str) -> int:
    """Characters of a task's text before its question: the last place where the question's fixed words begin.

    Raises:
        ValueError: they are not in the text.
    """
    places = [match.start() for match in _QUESTIONS[family(task)].finditer(text)]
    if not places:
        raise ValueError(f"no question of RULER's task {task} in it")
    return places[-1]


def asked_parts(rest: str, task: str) -> tuple[str, str]:
    """Split what follows a task's context into its question and its answer prefix.

    Raises:
        ValueError: there is no answer prefix.
    """
    place = rest.find(_ANSWERS[family(task)])
    if place < 0:
        raise ValueError(f"no answer prefix ({_ANSWERS[family(task)]} ...) after the question of RULER's task {task}")
    return rest[:place], rest[place:]


def family(task: str) -> str:
    """``niah`` of ``niah_single_1``."""
    return task.partition("_")[0]


@dataclass
class Ruler(LongContext):
    """RULER at one length; see ``LongContext`` for ``chat`` and ``question``.

    Attributes:
        length: of the Hub's configuration, in tokens of the tokenizer that it was made with; files in a folder have
            their own. A chat template's tokens come on top.
        tasks: which of the 13.
        rows_per_task: samples of each, in a complete set.
    """

    length: int = 4096
    tasks: tuple[str, ...] = RULER_TASKS
    rows_per_task: int = 500

    name = "ruler"
    modality = "text"
    hub_id = "simonjegou/ruler"
    rows = 500 * len(RULER_TASKS)
    primary = "string_match"
    scored_by = RulerMatch
    allowed: ClassVar = {"tasks": RULER_TASKS, "question": QUESTIONS}
    ranges: ClassVar = {"length": (1, MAX_TOKENS), "rows_per_task": (1, MAX_COUNT)}
    where = (
        "hf download simonjegou/ruler --repo-type dataset --include '4096/*' --local-dir DIR; or DIR as "
        "--save_dir of RULER's own scripts/data/prepare.py (https://github.com/NVIDIA/RULER), which leaves "
        "DIR/TASK/validation.jsonl. The task ruler_synthetic needs no files"
    )

    @property
    def expected_rows(self) -> int:
        """``rows_per_task`` of each of ``tasks``."""
        return self.rows_per_task * len(self.tasks)

    def samples(self) -> list[Sample]:
        """Task by task; ids are a task's name and the sample's number."""
        source = task_source(self)
        files = [Path(source) / task / FILE for task in self.tasks] if isinstance(source, Path) else []
        if any(path.is_file() for path in files):
            return [sample for path in files for sample in self._read_task(path)]
        rows = read_split(self, "test", _PARQUET, config=str(self.length))
        numbers: defaultdict[str, Iterator[int]] = defaultdict(count)
        named = [(row, row.values["task"], next(numbers[row.values["task"]])) for row in rows]
        return [self._parquet_sample(row, f"{task}-{number}") for row, task, number in named if task in self.tasks]

    def _parquet_sample(self, row: FileRow, name: str) -> Sample:
        values = row.values
        if not values["answer"]:
            raise ValueError(f"{row.place} has no answer; fetch the file again")
        question, prefix = values["question"], values["answer_prefix"]
        if not prefix and self.compresses_question and not self.chat:
            raise ValueError(f"{row.place} has no answer prefix to go on from; ask with question: kept, or chat: true")
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
    asker: LongContext, task: str, name: str, parts: tuple[str, str, str], answers: Sequence[str]
) -> Sample:
    """Return a sample of a task from its context, question and answer prefix."""
    context, question, prefix = parts
    return Sample(
        id=name,
        prompt=context + question + prefix,
        reference={"task": task, "answers": list(answers)},
        context_characters=len(context) + (len(question) if asker.compresses_question else 0),
        max_new_tokens=NEW_TOKENS[family(task)],
        kind=task,
        chat=asker.chat,
        prefix_characters=len(prefix) if asker.chat else None,
    )
