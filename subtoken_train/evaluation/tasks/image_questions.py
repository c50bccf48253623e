"""Tasks of one image and one question a row: their base, and those that have the Hub's Parquet form alone.

Multiple choice (AI2D, MMStar, RealWorldQA, SEED-Bench) is asked and scored as in lmms-eval:
``tasks/{ai2d,mmstar,realworldqa,seedbench}`` and ``_task_utils/mcq_extract.py`` at 75571cfe, with the words of its
default models.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Any, ClassVar

from subtoken_train.evaluation.metrics import short_answers
from subtoken_train.evaluation.metrics.choices import best_placed_letter
from subtoken_train.evaluation.metrics.metric import TaskMetric, mean_of
from subtoken_train.evaluation.tasks.files import FileRow, read_split, task_source, unique_ids
from subtoken_train.evaluation.tasks.task import Sample, Task

SHORT_ANSWER = "\nAnswer the question using a single word or phrase."
LETTER_ANSWER = "\nAnswer with the option's letter from the given choices directly."
"""LLaVA-1.5's words for short answers and for letters; lmms-eval's default too."""


@dataclass
class ImageQuestions(Task):
    """A benchmark of one question and its image a row: its row of the table says it, and methods where it differs."""

    modality = "image"
    config: ClassVar[str | None] = None  # the set's configuration; None: its default one
    named: ClassVar[str | None] = None  # column of ids; None: a sample's id is its place in the files, from 0
    kinds: ClassVar[str | None] = None
    """Column of what scores are also shown by, or of a list of it; None, or an empty cell: ``question``."""
    ending: ClassVar[str] = SHORT_ANSWER  # words after the question

    def samples(self) -> Sequence[Sample]:
        """Return all samples, of the benchmark's own files or of the Parquet set."""
        source = task_source(self)
        rows = self.own_rows(source) if isinstance(source, Path) else None
        rows = self.parquet_rows() if rows is None else rows
        samples = [self.sample(row, number) for number, row in enumerate(rows)]
        self.check(samples, rows)
        return samples

    def own_rows(self, folder: Path) -> list[FileRow] | None:
        """Return the rows of a folder with files of the benchmark's own form; None where it has none of those."""
        return None

    def parquet_rows(self) -> list[FileRow]:
        """Return the rows of the Parquet set."""
        return read_split(self, self.answered, self.columns, ["image"], self.config)

    def sample(self, row: FileRow, number: int) -> Sample:
        """Return the sample of one row, whose number in the whole split counts from 0."""
        name = number if self.named is None else row.values[self.named]
        text, reference, kind = self.question(row), self.reference(row), self.kind(row)
        return self.ask(row, name, text, reference, max_new_tokens=self.tokens, kind=kind)

    def ask(self, row: FileRow, name: object, text: str, reference: Mapping[str, Any], **others: Any) -> Sample:
        """Make a sample: the row's image, then ``text``; ``name`` is its id, and ``others`` are more of its fields."""
        return Sample(str(name), f"<image>\n{text}", reference, row.image(), **others)

    def question(self, row: FileRow) -> str:
        """Return what is asked, options and all."""
        return row.text("question") + self.ending

    def reference(self, row: FileRow) -> dict[str, Any]:
        """Return what the metric reads: several accepted ``answers``."""
        return {"answers": self.answers(row, "answers")}

    def kind(self, row: FileRow) -> str:
        """Return what scores are also shown by."""
        given = None if self.kinds is None else row.values[self.kinds]
        if not given:
            return "question"
        return str(given[0]) if isinstance(given, list) else row.text(str(self.kinds))

    def check(self, samples: Sequence[Sample], rows: Sequence[FileRow]) -> None:
        """Refuse rows that cannot stand side by side, as of one id."""
        unique_ids((sample.id, row.place) for sample, row in zip(samples, rows, strict=True))

    def answer(self, row: FileRow) -> str:
        """Return a row's one answer, of its column ``answer``."""
        if row.values["answer"] is None:
            raise self.without_answer(row)
        return row.text("answer")

    def answers(self, row: FileRow, column: str) -> list[str]:
        """Return the texts of a column, at least one."""
        if not row.values.get(column):
            raise self.without_answer(row)
        return row.texts(column)

    def without_answer(self, row: FileRow) -> ValueError:
        """Return the error for a row that cannot be scored."""
        return ValueError(f"{row.place}: no answers, so this is another split's file; use that of {self.answered!r}")


def lettered(options: Mapping[str, str] | Iterable[str]) -> str:
    """Return ``A. first``, ``B. second``, ... in lines."""
    pairs = options.items() if isinstance(options, Mapping) else zip(ascii_uppercase, options, strict=False)
    return "\n".join(f"{letter}. {option}" for letter, option in pairs)


class ChartQA(ImageQuestions):
    """ChartQA (Masry et al., arXiv:2203.10244): questions about charts, written by people or made from captions."""

    scored_by = short_answers.RelaxedAccuracy
    ending = "\nAnswer the question with a single word."
    writers: ClassVar = {"human_test": "human", "augmented_test": "augmented"}

    def reference(self, row: FileRow) -> dict[str, Any]:
        return {"answer": self.answer(row), "kind": self.kind(row)}

    def kind(self, row: FileRow) -> str:
        if (label := row.values["type"]) not in self.writers:
            raise ValueError(f"{row.place}: type {label!r}; allowed: {', '.join(self.writers)}")
        return str(self.writers[label])


class Pages(ImageQuestions):
    """DocVQA (Mathew et al., arXiv:2007.00398) and InfographicVQA (arXiv:2104.12756), validation; no OCR words."""

    scored_by = short_answers.ANLS


class VizWiz(ImageQuestions):
    """VizWiz-VQA (Gurari et al., arXiv:1802.08218), validation; questions are capitalised as in lmms-eval."""

    scored_by = short_answers.SoftAccuracy
    ending = f"\nWhen the provided information is insufficient, respond with 'Unanswerable'.{SHORT_ANSWER}"

    def question(self, row: FileRow) -> str:
        return row.text("question").capitalize() + self.ending


class OCRBench(ImageQuestions):
    """OCRBench (Liu et al., arXiv:2305.07895): texts, forms, formulas by hand; its score is 1,000 ``accuracy``."""

    scored_by = short_answers.ContainsAnswer

    def question(self, row: FileRow) -> str:
        return row.text("question").strip()

    def reference(self, row: FileRow) -> dict[str, Any]:
        return {"answers": self.answers(row, "answer"), "formula": row.values["dataset"] == "HME100k"}


_LETTERS = tuple("ABCD")
_BEGINS = re.compile(r"\s*([A-Z])\.")


def placed(text: str, answer: str) -> bool:
    """Return whether the letter in the most telling place is the answer (MMStar's rule)."""
    return best_placed_letter(text, _LETTERS) == answer.strip().upper()


def _begins_or_is(text: str, answer: str) -> bool:
    begins = _BEGINS.match(text)
    return short_answers.without_punctuation(begins[1] if begins else text) == short_answers.without_punctuation(answer)


def _placed_or_equal(text: str, answer: str) -> bool:
    answer = answer.strip()
    return placed(text, answer) if answer.upper() in _LETTERS else text.lower().strip().rstrip(".") == answer.lower()


LETTER_RULES: Mapping[str, Callable[[str, str], bool]] = {
    # a letter with a full stop begins the text, or is the text but for case and punctuation
    "ai2d": _begins_or_is,
    # ``placed`` for a letter; another answer is the text but for case and full stops
    "realworldqa": _placed_or_equal,
    # the first character is the letter, in either case
    "seedbench": lambda text, answer: text.strip()[:1].lower() == answer.strip().lower(),
}
LetterAccuracy = mean_of("accuracy", lambda said, of: LETTER_RULES[of["task"]](said, of["answer"]))
"""The share of right answers, by the rule of the reference's ``task``; it also holds ``answer``."""


MMStarAccuracy = mean_of("accuracy", lambda said, of: placed(said, of["answer"]))
"""Over all questions, as the paper, whose six categories are of one size."""


class ImageChoices(ImageQuestions):
    """A set whose answers are read by a rule of ``LetterAccuracy``."""

    scored_by: ClassVar[type[TaskMetric]] = LetterAccuracy

    def reference(self, row: FileRow) -> dict[str, Any]:
        return {"task": self.name, "answer": self.answer(row)}


class AI2D(ImageChoices):
    """AI2 Diagrams (Kembhavi et al., arXiv:1603.07396): diagrams of school books, their labels as they are."""

    def question(self, row: FileRow) -> str:
        return f"{row.text('question')}\n{lettered(row.texts('options'))}{LETTER_ANSWER}"

    def answer(self, row: FileRow) -> str:
        given, letters = str(row.values["answer"]), ascii_uppercase[: len(row.texts("options"))]
        if not given.isdecimal() or int(given) >= len(letters):
            raise ValueError(f"{row.place}: the answer is {given!r}, which is none of the {len(letters)} options")
        return letters[int(given)]


class MMStar(ImageChoices):
    """MMStar (arXiv:2403.20330), options in the question; lmms-eval's words without a stop; one file on the Hub."""

    scored_by = MMStarAccuracy

    def question(self, row: FileRow) -> str:
        return row.text("question").strip().replace(" Please answer yes or no.", "") + LETTER_ANSWER.rstrip(".")

    def reference(self, row: FileRow) -> dict[str, Any]:
        return {"answer": self.answer(row), "l2_category": row.text("l2_category")}

    def parquet_rows(self) -> list[FileRow]:
        source = task_source(self)
        alone = isinstance(source, Path) and (source / "mmstar.parquet").is_file()
        return read_split(self, "mmstar" if alone else self.answered, self.columns, ["image"])


class RealWorldQA(ImageChoices):
    """RealWorldQA (xAI, 2024): photographs, many from cars; options and the form of the answer are in the question."""

    def question(self, row: FileRow) -> str:
        return row.text("question").strip()

    def kind(self, row: FileRow) -> str:
        return "choice" if self.answer(row).strip().upper() in _LETTERS else "open"


class SEEDBench(ImageChoices):
    """SEED-Bench (Li et al., arXiv:2307.16125): the questions about images (lmms-eval's ``seed_image``), no videos."""

    dimensions: ClassVar = (
        "Scene Understanding", "Instance Identity", "Instance Attributes", "Instance Location", "Instances Counting",
        "Spatial Relation", "Instance Interaction", "Visual Reasoning", "Text Understanding",
    )  # fmt: skip

    def question(self, row: FileRow) -> str:
        options = lettered(row.text(f"choice_{letter}") for letter in "abcd")
        return f"{row.text('question')}\n{options}{LETTER_ANSWER}"

    def kind(self, row: FileRow) -> str:
        given, count = str(row.values["question_type_id"]), len(self.dimensions)
        if not given.isdecimal() or not 0 < int(given) <= count:
            raise ValueError(f"{row.place}: question_type_id {given!r}; allowed for images: 1 to {count}")
        return str(self.dimensions[int(given) - 1])

    def parquet_rows(self) -> list[FileRow]:
        return [row for row in super().parquet_rows() if row.values["data_type"] == "image"]
