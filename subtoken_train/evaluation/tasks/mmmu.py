"""MMMU, validation (Yue et al., arXiv:2311.16502): 900 questions of college exams in 30 subjects, up to 7 images each.

Asked as lmms-eval's ``mmmu_val`` asks its default models: the images stand first, and the text names them
("<image 1>"). What lmms-eval does beside it, each image in its place in the text, is not here. Answers are read by the
rules of the benchmark's ``eval/eval_utils.py``, as lmms-eval at 75571cfe has them, except that where these draw a
letter at random the answer here names no option.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

from subtoken_train.evaluation.metrics.metric import MeanScores
from subtoken_train.evaluation.tasks.file_rows import FileRow
from subtoken_train.evaluation.tasks.image_questions import LETTER_ANSWER, SHORT_ANSWER, ImageQuestions, lettered
from subtoken_train.evaluation.tasks.table_files import read_split
from subtoken_train.evaluation.tasks.task import Sample
from subtoken_train.typed import shown

_IMAGES = tuple(f"image_{number}" for number in range(1, 8))
_NAMED = re.compile(r"<image (\d+)>")
_ID = re.compile(r"[^_]+_(.+)_\d+")
_FRAMES = (("({})", "({})"), ("{} ", " {} "), ("{}.", " {} "))
"""Forms in which a letter may stand, each with the form whose last place then counts."""
_KEYS = ("could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ")
_TRIVIAL = tuple(":,.!?;'")
_NUMBERS = tuple(
    re.compile(form)
    for form in (
        r"-?\b\d{1,3}(?:,\d{3})+\b",
        r"-?\d+(?:\.\d+)?[eE][+-]?\d+",
        r"-?(?:\d+\.\d+|\.\d+|\d+\b)(?![eE][+-]?\d+)(?![,\d])",
    )
)


def chosen_letter(text: str, options: Sequence[str]) -> str | None:
    """Return the letter that an answer names: in brackets, before a space or a full stop, or by its option's words.

    Of several the one that stands last; None where the answer names none.
    """
    for mark in ",.!?;:'":
        text = text.strip(mark)
    text = f" {text} "
    letters = ascii_uppercase[: len(options)]
    for frame, place in _FRAMES:
        if found := [letter for letter in letters if frame.format(letter) in text]:
            return max(found, key=lambda letter: text.rfind(place.format(letter)))
    text = text.lower()
    places = {letter: text.rfind(option.lower()) for letter, option in zip(letters, options, strict=True)}
    said = [letter for letter in places if places[letter] >= 0] if len(text.split()) > 5 else []
    return max(said, key=places.__getitem__) if said else None


def normalised(text: str) -> list[str | float]:
    """Return a number rounded to two decimals, else the text in lower case; a single letter with a space beside it."""
    text = text.strip()
    try:
        return [round(float(text.replace(",", "")), 2)]
    except ValueError:
        text = text.lower()
        return [f" {text}", f"{text} "] if len(text) == 1 else [text]


def open_answers(text: str) -> list[str | float]:
    """Return what an open answer may be read as: the end of each line that says "is", "so" or the like, and numbers."""
    text = text.strip().strip(".").lower()
    lines, ends = text.split("\n"), []
    for number, line in enumerate(lines, start=1):
        end = ""
        for key in (*_KEYS, "=") if number == len(lines) else _KEYS:
            if key in line and (not end or len(line.split(key)[-1].strip()) < len(end)):
                end = line.split(key)[-1].strip()
        if end and end not in _TRIVIAL:
            ends.append(end)
    ends = ends or [text]
    numbers = [number for end in ends for form in _NUMBERS for number in form.findall(end)]
    return [answer for said in (*ends, *numbers) for answer in normalised(said)]


def open_right(text: str, answers: Sequence[str]) -> bool:
    """Tell whether a reading of the text holds one of the answers, or is its number."""
    wanted = [each for answer in answers for each in normalised(answer)]
    texts = [each for each in wanted if isinstance(each, str)]
    return any(
        any(each in said for each in texts) if isinstance(said, str) else said in wanted for said in open_answers(text)
    )


class MMMUAccuracy(MeanScores):
    """Shares of right answers.

    Scores: ``accuracy``, by the benchmark's rules; ``lmms_accuracy``, which counts open answers (about one in twenty)
    as wrong: lmms-eval compares them character by character, so that none can be right.

    A reference holds ``answers``, and ``options``, none for an open question.
    """

    names = ("accuracy", "lmms_accuracy")

    @staticmethod
    def figures(prediction: str, reference: Mapping[str, Any]) -> dict[str, float]:
        """Return 1 or 0, in both readings."""
        options, answers = reference["options"], reference["answers"]
        if not options:
            return {"accuracy": float(open_right(prediction, answers)), "lmms_accuracy": 0.0}
        right = float(chosen_letter(prediction, options) in answers)
        return {"accuracy": right, "lmms_accuracy": right}


@dataclass
class MMMU(ImageQuestions):
    """The validation set; the test set has no public answers."""

    name = "mmmu"
    hub_id = "lmms-lab/MMMU"
    rows = 900
    scored_by = MMMUAccuracy
    answered = "validation"
    columns = ("id", "question", "options", "answer", "question_type")
    where = "hf download lmms-lab/MMMU --repo-type dataset --local-dir DIR --include 'data/validation-*'"

    def sample(self, row: FileRow, number: int) -> Sample:
        """Return the sample of a row."""
        name, options = row.text("id"), _listed(row, "options")
        subject = _ID.fullmatch(name)
        if subject is None:
            raise ValueError(f"{row.place}: id {name!r} names no subject, as in 'validation_Accounting_1'")
        choice = row.values["question_type"] == "multiple-choice"
        answers = [self.answer(row)] if choice or not self.answer(row).startswith("[") else _listed(row, "answer")
        if choice and answers[0] not in tuple(ascii_uppercase[: len(options)]):
            raise ValueError(f"{row.place}: the answer is {answers[0]!r}, which is none of the {len(options)} options")
        asked = f"{row.text('question')}\n{lettered(options)}" if choice else row.text("question")
        images = sorted({f"image_{found}" for found in _NAMED.findall(asked)})
        if unknown := [image for image in images if image not in _IMAGES]:
            raise ValueError(f"{row.place}: the question names {unknown[0]}; a row has {_IMAGES[0]} to {_IMAGES[-1]}")
        return Sample(
            name,
            "<image>\n" * len(images) + asked + "\n" + (LETTER_ANSWER if choice else SHORT_ANSWER),
            {"options": options if choice else [], "answers": answers},
            tuple(image for column in images for image in row.image(column)),
            max_new_tokens=128,
            kind=subject[1],
        )

    def parquet_rows(self) -> list[FileRow]:
        """Return the rows of the split."""
        return read_split(self, self.answered, self.columns, _IMAGES)


def _listed(row: FileRow, column: str) -> list[str]:
    """Return the texts of a cell that holds a list as Python writes it."""
    text = row.text(column)
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise ValueError(f"{row.place}: {column} is {shown(text)}, but must be a list of texts; fetch the file again")
    return found
