"""Multiple choice about one image as lmms-eval asks and scores it: AI2D, MMStar, RealWorldQA and SEED-Bench.

A task is a table row, and methods where it differs; the rule that reads its answers stands in ``RULES``. Sources:
``tasks/{ai2d,mmstar,realworldqa,seedbench}`` and ``_task_utils/mcq_extract.py`` of lmms-eval at 75571cfe, with the
words of its default models.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Any, ClassVar

from subtoken_train.evaluation.metrics.choices import best_placed_letter
from subtoken_train.evaluation.metrics.metric import MeanScores, TaskMetric, mean
from subtoken_train.evaluation.metrics.short_answers import without_punctuation
from subtoken_train.evaluation.tasks.file_rows import FileRow, task_source
from subtoken_train.evaluation.tasks.image_questions import LETTER_ANSWER, ImageQuestions, lettered
from subtoken_train.evaluation.tasks.table_files import read_split

_LETTERS = "ABCD"
_BEGINS = re.compile(r"\s*([A-Z])\.")


def begins_or_is(text: str, answer: str) -> bool:
    """Apply AI2D's rule: a letter with a full stop begins the text, or is the text but for case and punctuation."""
    begins = _BEGINS.match(text)
    return without_punctuation(begins[1] if begins else text) == without_punctuation(answer)


def placed(text: str, answer: str) -> bool:
    """Apply MMStar's rule: the letter in the most telling place."""
    return best_placed_letter(text, _LETTERS) == answer.strip().upper()


def placed_or_equal(text: str, answer: str) -> bool:
    """Apply RealWorldQA's rule: ``placed`` for a letter; another answer is the text but for case and full stops."""
    answer = answer.strip()
    if answer.upper() in tuple(_LETTERS):
        return placed(text, answer)
    return text.lower().strip().rstrip(".") == answer.lower()


def first_character(text: str, answer: str) -> bool:
    """Apply SEED-Bench's rule: the text's first character is the letter, in either case."""
    return text.strip()[:1].lower() == answer.strip().lower()


RULES: dict[str, Callable[[str, str], bool]] = {
    "ai2d": begins_or_is,
    "mmstar": placed,
    "realworldqa": placed_or_equal,
    "seedbench": first_character,
}
"""Rules that tell whether an answer is right, by task."""


class LetterAccuracy(MeanScores):
    """``accuracy``: the share of right answers, by the rule of the reference's ``task``; it also holds ``answer``."""

    names = ("accuracy",)

    @staticmethod
    def figures(prediction: str, reference: Mapping[str, Any]) -> dict[str, float]:
        """Return 1 or 0."""
        return {"accuracy": float(RULES[reference["task"]](prediction, reference["answer"]))}


class MMStarScores(TaskMetric):
    """Right answers to MMStar, whose reference also holds ``l2_category``.

    Scores:
        ``accuracy``: over all questions, as the paper, whose six categories are of one size.
        ``lmms_average``: lmms-eval's ``average``, the mean over the 18 axes (``l2_category``) of their accuracies.
    """

    def compute(self) -> dict[str, float]:
        """Return scores by name."""
        axes: dict[str, list[float]] = defaultdict(list)
        for prediction, reference in self.rows:
            axes[reference["l2_category"]].append(self.score(prediction, reference))
        right = [score for scores in axes.values() for score in scores]
        return {"accuracy": mean(right), "lmms_average": mean([mean(scores) for scores in axes.values()])}

    @staticmethod
    def score(prediction: Any, reference: Mapping[str, Any]) -> float:
        """Return the question's term of ``accuracy``."""
        return float(placed(prediction, reference["answer"]))


@dataclass
class ImageChoices(ImageQuestions):
    """A set whose answers ``RULES`` reads."""

    scored_by: ClassVar[type[TaskMetric]] = LetterAccuracy
    answered = "test"
    named: ClassVar[str | None] = None

    def reference(self, row: FileRow) -> dict[str, Any]:
        """Return the rule and the answer."""
        return {"task": self.name, "answer": self.answer(row)}


@dataclass
class AI2D(ImageChoices):
    """AI2 Diagrams (Kembhavi et al., arXiv:1603.07396): diagrams of school books, their labels as they are."""

    name = "ai2d"
    hub_id = "lmms-lab/ai2d"
    rows = 3088
    columns = ("question", "options", "answer")
    where = "hf download lmms-lab/ai2d --repo-type dataset --local-dir DIR --include 'data/test-*'"

    def question(self, row: FileRow) -> str:
        """Return question and options."""
        return f"{row.text('question')}\n{lettered(row.texts('options'))}{LETTER_ANSWER}"

    def answer(self, row: FileRow) -> str:
        """Return the letter of the option whose number a row has."""
        given, letters = str(row.values["answer"]), ascii_uppercase[: len(row.texts("options"))]
        if not given.isdecimal() or int(given) >= len(letters):
            raise ValueError(f"{row.place}: the answer is {given!r}, which is none of the {len(letters)} options")
        return letters[int(given)]


@dataclass
class MMStar(ImageChoices):
    """MMStar (Chen et al., arXiv:2403.20330): questions that cannot be answered without the image, options in them."""

    name = "mmstar"
    hub_id = "Lin-Chen/MMStar"
    rows = 1500
    scored_by = MMStarScores
    answered = "val"
    columns = ("index", "question", "answer", "category", "l2_category")
    where = "hf download Lin-Chen/MMStar mmstar.parquet --repo-type dataset --local-dir DIR"
    named = "index"
    tokens = 1024

    def question(self, row: FileRow) -> str:
        """Return the question; lmms-eval's words end without a full stop here."""
        return row.text("question").strip().replace(" Please answer yes or no.", "") + LETTER_ANSWER.rstrip(".")

    def kind(self, row: FileRow) -> str:
        """Return one of the six categories."""
        return row.text("category")

    def reference(self, row: FileRow) -> dict[str, Any]:
        """Return what the metric reads."""
        return {"answer": self.answer(row), "l2_category": row.text("l2_category")}

    def parquet_rows(self) -> list[FileRow]:
        """Return the rows of the Hub's set, or of its one file, which is not named by the split."""
        source = task_source(self)
        alone = isinstance(source, Path) and (source / "mmstar.parquet").is_file()
        return read_split(self, "mmstar" if alone else self.answered, self.columns, ["image"])


@dataclass
class RealWorldQA(ImageChoices):
    """RealWorldQA (xAI, 2024): photographs, many from cars; options and the form of the answer are in the question."""

    name = "realworldqa"
    hub_id = "lmms-lab/RealWorldQA"
    rows = 765
    columns = ("question", "answer")
    where = "hf download lmms-lab/RealWorldQA --repo-type dataset --local-dir DIR --include 'data/test-*'"

    def question(self, row: FileRow) -> str:
        """Return the question."""
        return row.text("question").strip()

    def kind(self, row: FileRow) -> str:
        """Return whether a letter is asked for."""
        return "choice" if self.answer(row).strip().upper() in tuple(_LETTERS) else "open"


SEED_KINDS = (
    "Scene Understanding",
    "Instance Identity",
    "Instance Attributes",
    "Instance Location",
    "Instances Counting",
    "Spatial Relation",
    "Instance Interaction",
    "Visual Reasoning",
    "Text Understanding",
)


@dataclass
class SEEDBench(ImageChoices):
    """SEED-Bench (Li et al., arXiv:2307.16125): the questions about images, in nine dimensions; those about videos go.

    So ``accuracy`` is lmms-eval's ``seed_image``.
    """

    name = "seedbench"
    hub_id = "lmms-lab/SEED-Bench"
    rows = 14_233
    columns = (
        "question_id", "question", "choice_a", "choice_b", "choice_c", "choice_d", "answer", "data_type",
        "question_type_id",
    )  # fmt: skip
    where = "hf download lmms-lab/SEED-Bench --repo-type dataset --local-dir DIR"
    named = "question_id"

    def question(self, row: FileRow) -> str:
        """Return question and options."""
        options = lettered(row.text(f"choice_{letter}") for letter in "abcd")
        return f"{row.text('question')}\n{options}{LETTER_ANSWER}"

    def kind(self, row: FileRow) -> str:
        """Return the dimension."""
        given = str(row.values["question_type_id"])
        if not given.isdecimal() or not 0 < int(given) <= len(SEED_KINDS):
            raise ValueError(f"{row.place}: question_type_id {given!r}; allowed for images: 1 to {len(SEED_KINDS)}")
        return SEED_KINDS[int(given) - 1]

    def parquet_rows(self) -> list[FileRow]:
        """Return the rows about images."""
        return [row for row in super().parquet_rows() if row.values["data_type"] == "image"]
