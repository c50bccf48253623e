"""Mathematics with one answer, reasoned out while decoding: MATH-500 (Hendrycks et al., Lightman et al.) and AIME 2025.

Prompts are lm-evaluation-harness's (``hendrycks_math500``, ``aime25``), without examples. Both scorers are others' own:
math-verify's, called as the harness's ``minerva_math500`` calls it, and the harness's exact match. Answers are long, so
that memory is what is decoded: an arm's ``eviction_every`` bounds it. What may be compressed of the problem before is
the default split of a text, all but its last tokens.

Not here: several answers to a problem and their majority, sampling, and a judge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from subtoken_train.errors import check_package
from subtoken_train.evaluation.metrics.metric import MeanScores
from subtoken_train.evaluation.tasks.file_rows import FileRow, read_jsonl, task_source, unique_ids
from subtoken_train.evaluation.tasks.table_files import read_split
from subtoken_train.evaluation.tasks.task import Sample, Task

FILE = "test.jsonl"
_MOST_TOKENS = 2**20
SECONDS = 60
"""Seconds that an answer may take to be read, and to be compared; the library's own five depend on the machine."""


def check_scorers() -> None:
    """Raise a worded ``ValueError`` where math-verify or lm-evaluation-harness is missing."""
    for package in ("math_verify", "lm_eval"):
        check_package(package, "eval", "the scoring of mathematical answers")


@cache
def _scorer(name: str) -> Any:
    """Return a module of the scorers'."""
    check_scorers()
    return import_module(name)


class MathAccuracy(MeanScores):
    r"""Shares of right answers.

    Scores:
        ``accuracy``: what math-verify finds equal to the reference: the last box, formula or number, evaluated.
            An answer that takes longer than ``SECONDS`` is wrong. It needs the process's main thread.
        ``lm_eval_exact_match``: the harness's, of texts: for AIME the last ``\boxed{}``, else all between the first and
            the last dollar sign, else the whole answer; for MATH-500 without the box.

    A reference holds ``answer``, ``solution``, whose last box is that, and ``harness``: the harness's task folder.
    """

    names = ("accuracy", "lm_eval_exact_match")

    @staticmethod
    def figures(prediction: str, reference: Mapping[str, Any]) -> dict[str, float]:
        """Return 1 or 0, by both scorers."""
        verify = _scorer("math_verify")
        gold, target = (verify.parse(text, parsing_timeout=SECONDS) for text in (reference["solution"], prediction))
        right = verify.verify(gold=gold, target=target, timeout_seconds=SECONDS)
        harness = _scorer(f"lm_eval.tasks.{reference['harness']}.utils")
        found = harness.process_results({name: reference[name] for name in ("answer", "solution")}, [prediction])
        return {"accuracy": float(right), "lm_eval_exact_match": float(found["exact_match"])}


@dataclass
class MathProblems(Task):
    """Problems of one JSON-lines or Parquet file.

    Attributes:
        chat: ask in the tokenizer's chat template, which may let a model think first; one without it is refused.
    """

    chat: bool = field(default=False, kw_only=True)
    max_new_tokens: int = field(default=32_768, kw_only=True)

    modality = "text"
    primary = "accuracy"
    scored_by = MathAccuracy
    ranges: ClassVar = {"max_new_tokens": (1, _MOST_TOKENS)}
    columns: ClassVar[tuple[str, ...]]
    """Columns that make a sample."""
    begins: ClassVar[str]
    """Word before the problem; an answer that writes it again ends there."""
    harness: ClassVar[str]
    """Folder of the harness's tasks that scores it."""

    @property
    def asks(self) -> str:
        return f"{'in the chat template' if self.chat else 'raw text, no chat template'}; the problem's end kept"

    def check_requirements(self) -> None:
        """Require both scorers."""
        check_scorers()

    def samples(self) -> list[Sample]:
        """Return the problems in the file's order."""
        source = task_source(self)
        if isinstance(source, Path) and (source / FILE).is_file():
            rows = read_jsonl(source / FILE, self.columns)
        else:
            rows = read_split(self, "test", self.columns)
        samples = [self.sample(row, number) for number, row in enumerate(rows)]
        unique_ids((sample.id, row.place) for sample, row in zip(samples, rows, strict=True))
        return samples

    def sample(self, row: FileRow, number: int) -> Sample:
        """Return the sample of a row."""
        prompt = f"{self.begins} {row.text('problem')}\nAnswer:"
        return Sample(
            self.name_of(row, number),
            prompt,
            {"answer": str(row.values["answer"]), "solution": self.solution(row), "harness": self.harness},
            max_new_tokens=self.max_new_tokens,
            stop=(self.begins,),
            kind=self.kind(row),
            chat=self.chat,
            messages=({"role": "user", "content": prompt},) if self.chat else (),
        )

    def name_of(self, row: FileRow, number: int) -> str:
        """Return a row's id: its place in the file, from 0."""
        return str(number)

    def solution(self, row: FileRow) -> str:
        r"""Return a text that ends in the answer, in ``\boxed{}``."""
        return rf"\boxed{{{row.values['answer']}}}"

    def kind(self, row: FileRow) -> str:
        """Return what scores are also shown by."""
        return "problem"


@dataclass
class AIME25(MathProblems):
    """The 30 problems of the American Invitational Mathematics Examination of 2025, whose answers are whole numbers."""

    name = "aime25"
    hub_id = "math-ai/aime25"
    rows = 30
    columns = ("problem", "answer")
    begins = "Question:"
    harness = "aime"
    where = "hf download math-ai/aime25 test.jsonl --repo-type dataset --local-dir DIR"


@dataclass
class Math500(MathProblems):
    """MATH-500: 500 problems of MATH's test set (arXiv:2103.03874), drawn by Lightman et al. (arXiv:2305.20050).

    The harness's own cap on an answer is 256 tokens, which cuts reasoning off.
    """

    max_new_tokens: int = field(default=4096, kw_only=True)

    name = "math500"
    hub_id = "HuggingFaceH4/MATH-500"
    rows = 500
    columns = ("problem", "solution", "answer", "subject", "unique_id")
    begins = "Problem:"
    harness = "hendrycks_math"
    where = "hf download HuggingFaceH4/MATH-500 test.jsonl --repo-type dataset --local-dir DIR"

    def name_of(self, row: FileRow, number: int) -> str:
        """Return the problem's path in MATH."""
        return row.text("unique_id")

    def solution(self, row: FileRow) -> str:
        """Return the solution that MATH gives; one without a boxed answer is refused."""
        solution = row.text("solution")
        if r"\boxed" not in solution:
            raise ValueError(rf"{row.place}: the solution has no answer in \boxed; fetch the file again")
        return solution

    def kind(self, row: FileRow) -> str:
        """Return the subject."""
        return row.text("subject")
