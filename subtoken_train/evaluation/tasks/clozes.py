"""Clozes made of what Python packages bring along: sentences of their docstrings, and calls in their source.

A window of text is what may be compressed. What is read after it ends before a rare word of a sentence, or before the
name of a call, and the true text that follows is scored, so nothing is generated: an answer is right where each of its
tokens is the greedy choice. Samples are a pure function of the options and of the files, by default the standard
library of the Python that runs: scores compare on one Python and the same options alone.
"""

import ast
import re
import sysconfig
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar
from zlib import crc32

from subtoken_train.documents import read_text
from subtoken_train.errors import MAX_COUNT, MAX_TOKENS
from subtoken_train.evaluation.metrics.metric import MeanScores
from subtoken_train.evaluation.tasks.task import Sample, Task

_HALVES = ("dev", "test")
_APART = {"site-packages", "test", "tests", "encodings", "pydoc_data"}  # pydoc_data's text is that of ``data english``
Gap = tuple[str, str, str]
"""Holds what is read after the context, the answer that follows, and the answer with the rest of its line."""


class ClozeScores(MeanScores):
    """``accuracy``: answers said greedily; ``line``: so with the rest of the line; ``nats`` that this costs, a line.

    Predictions are the log-likelihoods of answer and line, then 1 or 0 for each: whether greedy decoding says it.
    """

    names = ("accuracy", "line", "nats")
    points = frozenset({"nats"})

    @staticmethod
    def figures(prediction: Any, reference: Mapping[str, Any]) -> dict[str, float]:
        _, likelihood, *said = prediction
        return dict(zip(("nats", "accuracy", "line"), (-likelihood, *said), strict=True))


@dataclass
class Cloze(Task):
    """Windows of the files of one half, none of which the other has; the table's ``kinds`` is ``manual`` or ``code``.

    Attributes:
        contexts: windows that do not overlap; ``questions`` are asked of each.
        characters: of a window at most; of prose a quarter of them are tokens, of source a third.
        source: a folder of Python files; None: the standard library.
    """

    contexts: int = 60
    questions: int = 1
    characters: int = 4000
    half: str = "test"
    seed: int = 0

    needs_files: ClassVar[bool] = False
    allowed: ClassVar = {"half": _HALVES}
    ranges: ClassVar = {"contexts": (1, MAX_COUNT), "questions": (1, 100), "characters": (1000, MAX_TOKENS)}
    kinds: ClassVar[str]

    @property
    def expected_rows(self) -> int:
        return self.contexts * self.questions

    def samples(self) -> list[Sample]:
        folder, made = str(self.source or sysconfig.get_paths()["stdlib"]), list[Sample]()
        windows, files_with = _windows(folder, self.half, self.kinds == "code", self.characters)
        for number in Random(self.seed).sample(range(len(windows)), len(windows)):
            context, gaps = (_calls if self.kinds == "code" else _words)(windows[number], files_with)
            if len(gaps) >= self.questions and len(made) < self.expected_rows:
                how: dict[str, Any] = {"context_characters": len(context), "kind": self.kinds, "greedy": True}
                chosen = Random(f"{self.seed}-{number}").sample(gaps, self.questions)
                for place, (before, answer, line) in enumerate(chosen):
                    reference, asked = {"answer": answer.strip(), "line": line}, context + before
                    made.append(Sample(f"{number}-{place}", asked, reference, choices=(answer, line), **how))
        if len(made) < self.expected_rows:
            few = f"{folder} has {len(made) // self.questions} of {self.contexts} contexts in its {self.half} half"
            raise ValueError(f"task {self.name}: {few}; ask for fewer or shorter ones, or for fewer questions")
        return made


def _windows(folder: str, half: str, code: bool, characters: int) -> tuple[list[list[str]], Counter[str]]:
    """Return windows of lines of source, or of docstrings; and how many files have a word."""
    windows, room, files_with = list[list[str]](), 0, Counter[str]()
    for path in sorted(Path(folder).rglob("*.py")):
        inside = path.relative_to(folder)
        if not _APART.isdisjoint(inside.parts) or _HALVES[crc32(inside.as_posix().encode()) % 2] != half:
            continue
        pieces = read_text(path).splitlines(keepends=True) if code else _docstrings(path)
        files_with.update(set(re.findall(r"\w+", "".join(pieces))))
        for piece in (piece for piece in pieces if len(piece) <= characters):
            if (room := room - len(piece)) < 0:
                windows.append([])
                room = characters - len(piece)
            windows[-1].append(piece)
    return windows, files_with


def _docstrings(path: Path) -> list[str]:
    """Return a file's docstrings of 20 words or more, in one line each, after the name of what they are of."""
    try:
        nodes = [*ast.walk(ast.parse(read_text(path)))]
    except SyntaxError as error:
        raise ValueError(f"{path} is not Python of this version ({error}); leave it out of the folder") from None
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    told = [(getattr(node, "name", path.stem), ast.get_docstring(node)) for node in nodes if isinstance(node, kinds)]
    return [f"{name}: {' '.join(said.split())}\n" for name, said in told if said and len(said.split()) >= 20]


def _words(window: list[str], files_with: Counter[str]) -> tuple[str, list[Gap]]:
    """Find words of 7 letters or more that stand once and in no other file, 8 words or more after a sentence began."""
    context, gaps = "".join(window), list[Gap]()
    for sentence in re.split(r"(?<=[.!?])\s+", context):
        for word in re.finditer(r" ([A-Za-z_]\w{6,})(?=[ ,;:)]|[.!?]?$)", sentence):
            before, rest = sentence[: word.start()], sentence[word.start() :]
            once = files_with[word[1]] == context.count(word[1]) == context.count(before) == 1
            if once and len(before.split()) >= 8 and len(sentence.split()) <= 50:
                asked = f"\n\nQuestion: Which words complete this sentence of the text?\nAnswer: {before}"
                gaps.append((asked, word[0], rest))
    return context, gaps


def _calls(window: list[str], files_with: Counter[str]) -> tuple[str, list[Gap]]:
    """Find calls, in the last 16 lines, of names of 6 letters or more that are there twice, and in 3 files at most."""
    context, lines, gaps = "".join(window[:-16]), window[-16:], list[Gap]()
    for number, line in enumerate(lines):
        for call in re.finditer(r"(?<=[\w ])[^\w\s]*\b([A-Za-z_]\w{5,})(?=\()", line):
            before, words = "".join(lines[:number]) + line[: call.start()], line[: call.start()].split()
            seen = re.findall(rf"\b{call[1]}\w*", context)
            known = files_with[call[1]] <= 3 and len(seen) > 1 and set(seen) == {call[1]} and call[1] not in before
            if known and words and words[-1] not in ("def", "class") and not words[0].startswith("#"):
                gaps.append((before, call[0], line[call.start() :].rstrip()))
    return context, gaps
