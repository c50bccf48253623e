"""MathVista, testmini (Lu et al., ICLR 2024): 1,000 questions, asked as lmms-eval's ``format-prompt``.

Read from the Hub's Parquet files, or from ``testmini.json`` beside its ``images`` folder; captions and detected texts
are not in the prompt. Answers are normalised and compared as the original does; rules extract them where it asks a
language model, so an answer in running text may be read differently.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from subtoken_train.evaluation.metrics.metric import mean_of
from subtoken_train.evaluation.metrics.short_answers import levenshtein
from subtoken_train.evaluation.tasks.files import FileRow, read_entries
from subtoken_train.evaluation.tasks.image_questions import LETTER_ANSWER, ImageQuestions, lettered
from subtoken_train.evaluation.tasks.table import WORDS

_SAID = re.compile(
    r"(?i:answer|option|choice)(?i:\s+is)?\s*:?\s*(?:\(([A-Za-z])\)|([A-Z])(?![\w'])|([a-z])\s*\.?$)"
)  # a small letter must stand in brackets or at the end: "the answer is a triangle" names no choice
_LEADING = re.compile(r"\(?([A-Z])(?:[.):]|$)|\(?([a-z])\)?\.?$")
_ANSWER = re.compile(r"answer", re.IGNORECASE)
_NUMBER = re.compile(r"-?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_KINDS = {"integer": int, "float": float}
_LIST = re.compile(r"\[[^\[\]]*\]")
_BOXED = re.compile(r"\\boxed\{(?:\\text\{)?([^{}]*)\}")
_QUOTED = re.compile(r'The answer is "(.*)"\.')


def extract(response: str, choices: Sequence[str] | None, question_type: str, answer_type: str) -> str:
    """Extract the answer from ``response`` by rules; the response itself where none fits.

    In this order: a choice or a number; ``The answer is "..."``. Then for choices a letter that begins it, one that is
    said to be the answer, or the one choice it contains; for numbers the first after the last "answer", or the last
    one; for lists the last pair of brackets. Bold marks are dropped; where there is a box its content is read.
    """
    text = response.replace("**", "").replace("\N{MINUS SIGN}", "-").strip()
    if boxed := _BOXED.findall(text):
        text = boxed[-1].strip()
    if question_type == "multi_choice":
        return _extract_choice(text, choices or ())
    if _is_number(text, answer_type):
        return text
    if quoted := _QUOTED.search(text):
        return quoted.group(1)
    if answer_type == "list":
        found = (_LIST.findall(text) or [text])[-1]
        return re.sub(r"\s*,\s*", ", ", re.sub(r"\[\s+|\s+\]", lambda bracket: bracket[0].strip(), found))
    *_, after = _ANSWER.split(text)
    stated = _NUMBER.search(after) if after != text else None
    numbers = ([stated.group()] if stated else _NUMBER.findall(text)) if answer_type in _KINDS else []
    return numbers[-1].replace(",", "") if numbers else text


def _extract_choice(text: str, choices: Sequence[str]) -> str:
    if text in choices:
        return text
    if quoted := _QUOTED.search(text):
        return quoted.group(1)
    said = [match for match in (_LEADING.match(text), *reversed([*_SAID.finditer(text)])) if match]
    if said:
        return next(letter for letter in said[0].groups() if letter).upper()
    contained = [choice for choice in choices if choice.lower() in text.lower()]
    return contained[0] if len(contained) == 1 else text


def _is_number(text: str, answer_type: str) -> bool:
    try:
        return answer_type in _KINDS and _KINDS[answer_type](text) is not None
    except ValueError:
        return False


def normalise(
    extraction: object, choices: Sequence[str] | None, question_type: str, answer_type: str, precision: float | None
) -> str | None:
    """Return the extraction in the form that answers have; None where it has no such form.

    A choice is meant by its letter, alone or in brackets, or else is the one at the least edit distance (the first of
    equals). ``precision`` is the decimals of a ``float`` answer, of whole-number *type*: with 1.0 each is None, as in
    the original.
    """
    if question_type == "multi_choice":
        text, named = str(extraction).strip(), list(choices or ())
        letters = re.findall(r"\(([a-zA-Z])\)", text)
        letter = letters[0].upper() if letters else text
        place = ord(letter) - ord("A") if len(letter) == 1 else -1
        return named[place] if 0 <= place < len(named) else min(named, key=lambda each: levenshtein(letter, each))
    try:
        if answer_type == "integer":
            return str(int(float(extraction)))  # type: ignore[arg-type]
        if answer_type == "float":
            return str(round(float(extraction), precision))  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return str(extraction) if answer_type == "list" or extraction is not None else None


def is_right(prediction: str, reference: Mapping[str, Any]) -> bool:
    """Tell whether an answer is right; references hold what ``MathVista.sample`` takes of a row."""
    kinds = reference["choices"], reference["question_type"], reference["answer_type"]
    decimals = None if reference["precision"] is None else int(reference["precision"])  # the Hub's file has 1.0
    said = normalise(extract(prediction, *kinds), *kinds, decimals)
    return str(said).strip() == str(reference["answer"]).strip()


MathVistaAccuracy = mean_of("accuracy", is_right)


def mathvista_prompt(problem: Mapping[str, Any]) -> str:
    """Return a row's question with its unit, choices, and the form that the answer must have, one below the other."""
    unit = f" (Unit: {problem['unit']})" if problem["unit"] else ""
    choices = [lettered(problem["choices"])] if problem["choices"] else []
    kind, decimals = problem["answer_type"], problem["precision"]
    meant = [kind, decimals if kind == "float" else None]
    form = next((words for *own, words in WORDS["mathvista"] if own == meant), None)
    asked = f"Answer the question using a {form}."
    if problem["question_type"] == "multi_choice":
        asked = LETTER_ANSWER.strip()
    elif form is None:
        what = f"no prompt for an answer of type {kind!r} with precision {decimals}"
        raise ValueError(f"problem {problem['pid']}: {what}; allowed: integer, list, float with 1 or 2")
    return "\n".join([problem["question"] + unit, *choices, asked]).strip()


class MathVista(ImageQuestions):
    """Questions with choices or a number, scored by rules where the original asks a language model."""

    pictures = ("decoded_image",)  # ``image`` holds a name only

    def question(self, row: FileRow) -> str:
        return mathvista_prompt(row.values)

    def reference(self, row: FileRow) -> dict[str, Any]:
        if row.values["answer"] in (None, ""):
            raise self.without_answer(row)
        names = ("choices", "question_type", "answer_type", "precision", "answer")
        return {name: row.values[name] for name in names}

    def own_rows(self, folder: Path) -> list[FileRow] | None:
        path = folder / "testmini.json"
        if not path.is_file():
            return None
        rows = read_entries(path, None, (*self.columns, "image"))
        return [row.with_values(decoded_image=folder / row.text("image")) for row in rows]
