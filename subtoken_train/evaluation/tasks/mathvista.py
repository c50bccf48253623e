"""MathVista, testmini (Lu et al., ICLR 2024): 1,000 questions, asked as lmms-eval's ``format-prompt``.

Read from the Hub's Parquet files, or from the project's own ``testmini.json`` beside its ``images`` folder. Neither
captions nor detected texts of the images are in the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from subtoken_train.evaluation.metrics.extracted_answers import MathVistaAccuracy
from subtoken_train.evaluation.tasks.file_rows import FileRow
from subtoken_train.evaluation.tasks.image_questions import LETTER_ANSWER, ImageQuestions, lettered
from subtoken_train.evaluation.tasks.parquet_sets import read_split
from subtoken_train.evaluation.tasks.task import Sample
from subtoken_train.evaluation.tasks.text_files import read_named

_REFERENCE = ("choices", "question_type", "answer_type", "precision", "answer")
_DECIMALS = {1: "one decimal place", 2: "two decimal places"}
_NUMBERS = {
    "integer": "Answer the question using a single integer number.",
    "list": "Answer the question using a Python list.",
}
FILE = "testmini.json"


def mathvista_prompt(problem: Mapping[str, Any]) -> str:
    """A row's question with its unit, choices, and the form that the answer must have, one below the other.

    Raises:
        ValueError: no form is known for its kind of answer.
    """
    unit = f" (Unit: {problem['unit']})" if problem["unit"] else ""
    choices = [lettered(problem["choices"])] if problem["choices"] else []
    return "\n".join([problem["question"] + unit, *choices, _form(problem)]).strip()


def _form(problem: Mapping[str, Any]) -> str:
    kind, decimals = problem["answer_type"], problem["precision"]
    if problem["question_type"] == "multi_choice":
        return LETTER_ANSWER.strip()
    if kind in _NUMBERS:
        return _NUMBERS[kind]
    if kind == "float" and decimals in _DECIMALS:
        return f"Answer the question using a single floating-point number with {_DECIMALS[decimals]}."
    raise ValueError(
        f"problem {problem['pid']}: no prompt for an answer of type {kind!r} with precision {decimals}; allowed: "
        "integer, list, float with 1 or 2"
    )


@dataclass
class MathVista(ImageQuestions):
    """Questions with choices or a number, scored by rules where the original asks a language model."""

    name = "mathvista"
    hub_id = "AI4Math/MathVista"
    rows = 1_000
    primary = "accuracy"
    scored_by = MathVistaAccuracy
    answered = "testmini"
    columns = ("pid", "question", "choices", "unit", "precision", "answer", "question_type", "answer_type")
    where = (
        "hf download AI4Math/MathVista --repo-type dataset --include 'data/testmini-*' --local-dir DIR; or "
        "testmini.json and the images folder of https://github.com/lupantech/MathVista"
    )

    def sample(self, row: FileRow, number: int) -> Sample:
        """The sample of a problem; ids are their ``pid``."""
        values = row.values
        if values["answer"] in (None, ""):
            raise self.without_answer(row)
        reference = {name: values[name] for name in _REFERENCE}
        kind = str(values["question_type"])
        return self.ask(row, values["pid"], mathvista_prompt(values), reference, max_new_tokens=1024, kind=kind)

    def own_rows(self, folder: Path) -> list[FileRow] | None:
        """The problems of the project's own file."""
        if not (folder / FILE).is_file():
            return None
        rows = read_named(folder / FILE, (*self.columns, "image"))
        return [row.with_values(image=folder / row.text("image")) for row in rows.values()]

    def parquet_rows(self) -> list[FileRow]:
        """The rows of the Hub's set, whose column ``image`` holds a name only."""
        rows = read_split(self, self.answered, self.columns, images=("decoded_image",))
        return [row.with_values(image=row.values["decoded_image"]) for row in rows]
