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
from subtoken_train.evaluation.tasks.base import Sample, Task
from subtoken_train.evaluation.tasks.image_questions import about_image
from subtoken_train.evaluation.tasks.reading import Row, read_split, task_source, unique_ids
from subtoken_train.evaluation.tasks.text_files import read_json

_COLUMNS = ("pid", "question", "choices", "unit", "precision", "answer", "question_type", "answer_type")
_LETTER = "Answer with the option's letter from the given choices directly."
_DECIMALS = {1: "one decimal place", 2: "two decimal places"}
_NUMBERS = {
    "integer": "Answer the question using a single integer number.",
    "list": "Answer the question using a Python list.",
}
FILE = "testmini.json"


def mathvista_prompt(problem: Mapping[str, Any]) -> str:
    """Question with its unit, choices, and the form that the answer must have, one below the other.

    Args:
        problem: a row of the set.

    Raises:
        ValueError: no form is known for its kind of answer.
    """
    unit = f" (Unit: {problem['unit']})" if problem["unit"] else ""
    choices = [f"{chr(ord('A') + place)}. {choice}" for place, choice in enumerate(problem["choices"] or ())]
    lines = [problem["question"] + unit, *choices, _form(problem)]
    return "\n".join(lines).strip()


def _form(problem: Mapping[str, Any]) -> str:
    kind, decimals = problem["answer_type"], problem["precision"]
    if problem["question_type"] == "multi_choice":
        return _LETTER
    if kind in _NUMBERS:
        return _NUMBERS[kind]
    if kind == "float" and decimals in _DECIMALS:
        return f"Answer the question using a single floating-point number with {_DECIMALS[decimals]}."
    raise ValueError(
        f"problem {problem['pid']}: no prompt for an answer of type {kind!r} with precision {decimals}; allowed: "
        "integer, list, float with 1 or 2"
    )


@dataclass
class MathVista(Task):
    """Questions with choices or a number, scored by rules where the original asks a language model."""

    name = "mathvista"
    modality = "image"
    hub_id = "AI4Math/MathVista"
    rows = 1_000
    primary = "accuracy"
    where = (
        "hf download AI4Math/MathVista --repo-type dataset --include 'data/testmini-*' --local-dir DIR; or "
        "testmini.json and the images folder of https://github.com/lupantech/MathVista"
    )

    def samples(self) -> list[Sample]:
        """All problems; ids are their ``pid``."""
        source = task_source(self)
        own = isinstance(source, Path) and (source / FILE).is_file()
        rows = _own_rows(Path(source)) if own else read_split(self, "testmini", _COLUMNS, images=("decoded_image",))
        unique_ids((str(row.values["pid"]), row.place) for row in rows)
        return [_sample(row) for row in rows]

    def metric(self) -> MathVistaAccuracy:
        """Accuracy after extraction by rules."""
        return MathVistaAccuracy()


def _own_rows(folder: Path) -> list[Row]:
    content = read_json(folder / FILE)
    if not isinstance(content, dict):
        raise ValueError(f"{folder / FILE} is no object of problems by their number")
    rows = []
    for number, problem in content.items():
        place = f"{folder / FILE}, problem {number}"
        if missing := [name for name in (*_COLUMNS, "image") if name not in problem]:
            raise ValueError(f"{place} has no {', '.join(missing)}; fetch the file again")
        rows.append(Row(problem | {"decoded_image": folder / problem["image"]}, place))
    return rows


def _sample(row: Row) -> Sample:
    values = row.values
    if values["answer"] in (None, ""):
        raise ValueError(f"{row.place} has no answer; use the split testmini")
    if values["decoded_image"] is None:
        raise ValueError(f"{row.place} has no image; fetch the file again")
    names = ("choices", "question_type", "answer_type", "precision", "answer")
    return Sample(
        id=str(values["pid"]),
        prompt=about_image(mathvista_prompt(values)),
        reference={name: values[name] for name in names},
        images=(values["decoded_image"],),
        max_new_tokens=1024,
        kind=str(values["question_type"]),
    )
