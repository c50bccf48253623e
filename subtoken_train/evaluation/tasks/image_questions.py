"""Tasks of one image and one question per row: their base, and those that are read in the Hub's Parquet form alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Any, ClassVar

from subtoken_train.evaluation.metrics.short_answers import ANLS, ContainsAnswer, RelaxedAccuracy
from subtoken_train.evaluation.metrics.vqa_accuracy import SoftAccuracy
from subtoken_train.evaluation.tasks.file_rows import FileRow, task_source, unique_ids
from subtoken_train.evaluation.tasks.table_files import read_split
from subtoken_train.evaluation.tasks.task import Sample, Task

SHORT_ANSWER = "\nAnswer the question using a single word or phrase."
"""LLaVA-1.5's words for short answers; lmms-eval's default too."""
LETTER_ANSWER = "\nAnswer with the option's letter from the given choices directly."
"""LLaVA-1.5's words for letters; lmms-eval's default too."""


@dataclass
class ImageQuestions(Task):
    """A benchmark of one question and its image a row: class attributes say it, and methods where it differs."""

    modality = "image"
    primary = "accuracy"
    answered: ClassVar[str]
    """The split whose answers are public."""
    columns: ClassVar[tuple[str, ...]]
    """Columns that make a sample, beside ``image``."""
    config: ClassVar[str | None] = None
    """The set's configuration; None: its default one."""
    named: ClassVar[str | None] = "question_id"
    """Column of ids; None: a sample's id is its place in the files, from 0."""
    kinds: ClassVar[str | None] = None
    """Column of what scores are also shown by, or of a list of it; None, or an empty cell: ``question``."""
    ending: ClassVar[str] = SHORT_ANSWER
    """Words after the question."""
    tokens: ClassVar[int] = 16
    """Cap on an answer."""

    def sample(self, row: FileRow, number: int) -> Sample:
        """Return the sample of one row, whose number in the whole split counts from 0.

        A value that the benchmark does not have raises a ``ValueError`` that names file and row.
        """
        name = number if self.named is None else row.values[self.named]
        text, reference, kind = self.question(row), self.reference(row), self.kind(row)
        return self.ask(row, name, text, reference, max_new_tokens=self.tokens, kind=kind)

    def question(self, row: FileRow) -> str:
        """Return what is asked, options and all."""
        return row.text("question") + self.ending

    def reference(self, row: FileRow) -> dict[str, Any]:
        """Return what the metric reads."""
        return self.people(row)

    def kind(self, row: FileRow) -> str:
        """Return what scores are also shown by."""
        given = None if self.kinds is None else row.values[self.kinds]
        if not given:
            return "question"
        return str(given[0]) if isinstance(given, list) else row.text(str(self.kinds))

    def samples(self) -> Sequence[Sample]:
        """Return all samples, of the files of the benchmark's own form or of the Parquet set; see ``Task``."""
        source = task_source(self)
        rows = self.own_rows(source) if isinstance(source, Path) else None
        if rows is None:
            rows = self.parquet_rows()
        samples = [self.sample(row, number) for number, row in enumerate(rows)]
        self.check(samples, rows)
        return samples

    def check(self, samples: Sequence[Sample], rows: Sequence[FileRow]) -> None:
        """Refuse rows that cannot stand side by side, as of one id, by a ``ValueError`` with their places."""
        unique_ids((sample.id, row.place) for sample, row in zip(samples, rows, strict=True))

    def own_rows(self, folder: Path) -> list[FileRow] | None:
        """Return the rows of a folder with files of the benchmark's own form; None where it has none of those."""
        return None

    def parquet_rows(self) -> list[FileRow]:
        """Return the rows of the Parquet set."""
        return read_split(self, self.answered, self.columns, ["image"], self.config)

    def ask(self, row: FileRow, name: object, text: str, reference: Mapping[str, Any], **others: Any) -> Sample:
        """Make a sample: the row's image, then ``text``; ``name`` is its id, and ``others`` are more of its fields."""
        return Sample(str(name), about_image(text), reference, row.image(), **others)

    def answer(self, row: FileRow) -> str:
        """Return a row's one answer, of its column ``answer``; a ``ValueError`` where there is none."""
        if row.values["answer"] is None:
            raise self.without_answer(row)
        return row.text("answer")

    def people(self, row: FileRow) -> dict[str, list[str]]:
        """Return what metrics over several accepted answers read, ``answers``; none is a ``ValueError``."""
        if not row.values.get("answers"):
            raise self.without_answer(row)
        return {"answers": row.texts("answers")}

    def without_answer(self, row: FileRow) -> ValueError:
        """Return the error for a row that cannot be scored."""
        return ValueError(f"{row.place}: no answers, so this is another split's file; use that of {self.answered!r}")


def about_image(text: str) -> str:
    """Return the user's turn: an image, then ``text``."""
    return f"<image>\n{text}"


def lettered(options: Mapping[str, str] | Iterable[str]) -> str:
    """Return ``A. first``, ``B. second``, ... in lines."""
    pairs = options.items() if isinstance(options, Mapping) else zip(ascii_uppercase, options, strict=False)
    return "\n".join(f"{letter}. {option}" for letter, option in pairs)


SINGLE_WORD = "\nAnswer the question with a single word."
CHART_KINDS = {"human_test": "human", "augmented_test": "augmented"}
UNANSWERABLE = "\nWhen the provided information is insufficient, respond with 'Unanswerable'."


@dataclass
class ChartQA(ImageQuestions):
    """ChartQA (Masry et al., arXiv:2203.10244): questions about charts, written by people or made from captions.

    The test set, whose answers are public.
    """

    name = "chartqa"
    hub_id = "lmms-lab/ChartQA"
    rows = 2500
    primary = "relaxed_accuracy"
    scored_by = RelaxedAccuracy
    answered = "test"
    named = None
    columns = ("type", "question", "answer")
    ending = SINGLE_WORD
    where = "hf download lmms-lab/ChartQA --repo-type dataset --local-dir DIR"

    def reference(self, row: FileRow) -> dict[str, Any]:
        """Return answer and kind."""
        return {"answer": self.answer(row), "kind": self.kind(row)}

    def kind(self, row: FileRow) -> str:
        """Return who wrote the question."""
        if (label := row.values["type"]) not in CHART_KINDS:
            raise ValueError(f"{row.place}: type {label!r}; allowed: {', '.join(CHART_KINDS)}")
        return CHART_KINDS[label]


@dataclass
class DocVQA(ImageQuestions):
    """DocVQA (Mathew et al., arXiv:2007.00398): scanned pages of industry documents.

    The validation set; the test set is scored by the challenge's server alone.
    """

    name = "docvqa"
    hub_id = "lmms-lab/DocVQA"
    rows = 5349
    primary = "lmms_anls"
    scored_by = ANLS
    answered = "validation"
    config = "DocVQA"
    named = "questionId"
    kinds = "question_types"
    tokens = 32
    columns = ("questionId", "question", "answers", "question_types")
    where = "hf download lmms-lab/DocVQA --repo-type dataset --local-dir DIR --include 'DocVQA/validation-*'"


@dataclass
class InfographicVQA(DocVQA):
    """InfographicVQA (arXiv:2104.12756); the words that a text detector found are not given to the model."""

    name = "infographicvqa"
    rows = 2801
    config = "InfographicVQA"
    kinds = "answer_type"
    columns = ("questionId", "question", "answers", "answer_type")
    where = "hf download lmms-lab/DocVQA --repo-type dataset --local-dir DIR --include 'InfographicVQA/validation-*'"


@dataclass
class VizWiz(ImageQuestions):
    """VizWiz-VQA (Gurari et al., arXiv:1802.08218): photographs and spoken questions of blind people.

    The validation set; the test set, which LLaVA's table shows, is scored by the challenge's server alone. Some
    questions are unanswerable. Prompts are lmms-eval's: the question capitalised, the rest of it in lower case.
    """

    name = "vizwiz"
    hub_id = "lmms-lab/VizWiz-VQA"
    rows = 4319
    scored_by = SoftAccuracy
    answered = "val"
    kinds = "category"
    tokens = 128
    columns = ("question_id", "question", "answers", "category")
    where = "hf download lmms-lab/VizWiz-VQA --repo-type dataset --local-dir DIR --include 'data/val-*'"

    def question(self, row: FileRow) -> str:
        """Return what is asked."""
        return row.text("question").capitalize() + UNANSWERABLE + SHORT_ANSWER


@dataclass
class OCRBench(ImageQuestions):
    """OCRBench (Liu et al., arXiv:2305.07895): reading text, questions about it, forms, and formulas by hand.

    ``accuracy`` times 1,000 is the benchmark's score.
    """

    name = "ocrbench"
    hub_id = "echo840/OCRBench"
    rows = 1000
    scored_by = ContainsAnswer
    answered = "test"
    named = None
    kinds = "question_type"
    tokens = 128
    columns = ("dataset", "question", "question_type", "answer")
    where = "hf download echo840/OCRBench --repo-type dataset --local-dir DIR"

    def question(self, row: FileRow) -> str:
        """Return the question alone."""
        return row.text("question").strip()

    def reference(self, row: FileRow) -> dict[str, Any]:
        """Return the accepted texts, and whether they are formulas."""
        if not row.values["answer"]:
            raise self.without_answer(row)
        return {"answers": row.texts("answer"), "formula": row.values["dataset"] == "HME100k"}
