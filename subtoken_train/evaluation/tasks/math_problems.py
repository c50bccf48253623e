"""Mathematics with one answer, reasoned out while decoding: MATH-500 (Hendrycks et al., Lightman et al.) and AIME 2025.

Prompts are lm-evaluation-harness's (``hendrycks_math500``, ``aime25``), without examples; the scorer is math-verify,
called as the harness's ``minerva_math500`` calls it. Answers are long, so that memory is what is decoded: an arm's
``eviction_every`` bounds it. Not here: several answers to a problem and their majority, sampling, and a judge.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from subtoken_train.errors import check_package
from subtoken_train.evaluation.metrics.metric import mean_of
from subtoken_train.evaluation.tasks.files import FileRow, read_jsonl, read_split, task_source
from subtoken_train.evaluation.tasks.task import Sample, Task

SECONDS = 60
"""Seconds that an answer may take to be read, and to be compared; the library's own five depend on the machine."""


def _check_scorer() -> None:
    check_package("math_verify", "eval", "the scoring of mathematical answers")


def is_equal(prediction: str, reference: Mapping[str, Any]) -> bool:
    """Tell whether math-verify finds an answer equal to ``solution`` within ``SECONDS``, in the main thread."""
    _check_scorer()
    math_verify: Any = import_module("math_verify")
    gold, target = (math_verify.parse(text, parsing_timeout=SECONDS) for text in (reference["solution"], prediction))
    return bool(math_verify.verify(gold=gold, target=target, timeout_seconds=SECONDS))


MathAccuracy = mean_of("accuracy", is_equal)


@dataclass
class MathProblems(Task):
    """Problems of one JSON-lines or Parquet file; ``chat``: ask in the tokenizer's template, or refuse."""

    chat: bool = field(default=False, kw_only=True)
    max_new_tokens: int = field(default=32_768, kw_only=True)

    ranges: ClassVar = {"max_new_tokens": (1, 2**20)}
    begins: ClassVar[str]  # word before the problem; an answer that writes it again ends there
    harness: ClassVar[str]  # folder of the harness's tasks that asks the same

    @property
    def asks(self) -> str:
        return f"{'in the chat template' if self.chat else 'raw text, no chat template'}; the problem's end kept"

    def check_requirements(self) -> None:
        _check_scorer()

    def samples(self) -> list[Sample]:
        source = task_source(self)
        if isinstance(source, Path) and (source / "test.jsonl").is_file():
            rows = read_jsonl(source / "test.jsonl", self.columns)
        else:
            rows = read_split(self, self.answered, self.columns)
        return [self._sample(row, number) for number, row in enumerate(rows)]

    def _sample(self, row: FileRow, number: int) -> Sample:
        prompt = f"{self.begins} {row.text('problem')}\nAnswer:"
        name, kind, solution = str(number), "problem", rf"\boxed{{{row.values['answer']}}}"
        if "solution" in self.columns:
            name, kind, solution = (row.text(column) for column in ("unique_id", "subject", "solution"))
        if r"\boxed" not in solution:
            raise ValueError(rf"{row.place}: the solution has no answer in \boxed; fetch the file again")
        return Sample(
            name,
            prompt,
            {"answer": str(row.values["answer"]), "solution": solution, "harness": self.harness},
            max_new_tokens=self.max_new_tokens,
            stop=(self.begins,),
            kind=kind,
            chat=self.chat,
            messages=({"role": "user", "content": prompt},) if self.chat else (),
        )


class AIME25(MathProblems):
    """The 30 problems of the American Invitational Mathematics Examination of 2025, whose answers are whole numbers."""

    begins = "Question:"
    harness = "aime"


@dataclass
class Math500(MathProblems):
    """MATH-500, of MATH's test set (arXiv:2103.03874, 2305.20050); the harness caps answers at 256 tokens."""

    max_new_tokens: int = field(default=4096, kw_only=True)

    begins = "Problem:"
    harness = "hendrycks_math"
