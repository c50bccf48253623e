"""Mathematics: MATH-500 (Hendrycks et al., Lightman et al.) and AIME 2025, and about images MathVista's testmini.

The first two are reasoned out while decoding. Their prompts are lm-evaluation-harness's (``hendrycks_math500``,
``aime25``), without examples; the scorer is math-verify, called as the harness's ``minerva_math500`` calls it. Answers
are long, so that memory is what is decoded: an arm's ``eviction_every`` bounds it. Not here: several answers to a
problem and their majority, sampling, and a judge.

MathVista (Lu et al., ICLR 2024) has 1,000 questions, asked as lmms-eval's ``format-prompt``, read from the Hub's
Parquet files, or from ``testmini.json`` beside its ``images`` folder; captions and detected texts are not in prompts.
Answers are normalised and compared as the original does; rules extract them where it asks a language model, so an
answer in running text may be read differently.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from subtoken_train.errors import check_package, refuse
from subtoken_train.evaluation.metrics.metric import mean_of
from subtoken_train.evaluation.metrics.short_answers import levenshtein
from subtoken_train.evaluation.tasks.files import FileRow, read_entries, read_jsonl, read_split, task_source
from subtoken_train.evaluation.tasks.image_questions import LETTER_ANSWER, ImageQuestions, lettered
from subtoken_train.evaluation.tasks.table import WORDS
from subtoken_train.evaluation.tasks.task import Sample, Task

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
        refuse((r"\boxed" not in solution, rf"{row.place}: the solution has no answer in \boxed; fetch the file again"))
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


def extract(response: str, choices: Sequence[str] | None, question_type: str, answer_type: str) -> str:
    """Extract the answer from ``response`` by rules; the response itself where none fits.

    In this order: a choice or a number; ``The answer is "..."``. Then for choices a letter that begins it, one that is
    said to be the answer, or the one choice it contains; for numbers the first after the last "answer", or the last
    one; for lists the last pair of brackets. Bold marks are dropped; where there is a box its content is read.
    """
    text = response.replace("**", "").replace("\N{MINUS SIGN}", "-").strip()
    if boxed := _BOXED.findall(text):
        text = boxed[-1].strip()
    chosen = question_type == "multi_choice"
    if text in (choices or ()) if chosen else _is_number(text, answer_type):
        return text
    if quoted := _QUOTED.search(text):
        return quoted.group(1)
    if chosen:
        return _extract_choice(text, choices or ())
    if answer_type == "list":
        found = (_LIST.findall(text) or [text])[-1]
        return re.sub(r"\s*,\s*", ", ", re.sub(r"\[\s+|\s+\]", lambda bracket: bracket[0].strip(), found))
    *_, after = _ANSWER.split(text)
    stated = _NUMBER.search(after) if after != text else None
    numbers = ([stated.group()] if stated else _NUMBER.findall(text)) if answer_type in _KINDS else []
    return numbers[-1].replace(",", "") if numbers else text


def _extract_choice(text: str, choices: Sequence[str]) -> str:
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
    return str(normalise(extract(prediction, *kinds), *kinds, decimals)).strip() == str(reference["answer"]).strip()


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
        return {key: row.values[key] for key in ("choices", "question_type", "answer_type", "precision", "answer")}

    def own_rows(self, folder: Path) -> list[FileRow] | None:
        if not (path := folder / "testmini.json").is_file():
            return None
        rows = read_entries(path, None, (*self.columns, "image"))
        return [row.with_values(decoded_image=folder / row.text("image")) for row in rows]
