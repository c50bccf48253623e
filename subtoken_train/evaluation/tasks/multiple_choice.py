"""MMBench, ScienceQA and MMMU: multiple choice (and MMMU's open questions) about images, in forms of their own.

MMBench, development set (Liu et al., arXiv:2307.06281), in lmms-eval's form: 4,329 rows, what the paper scores. The
rotations of a question are rows of their own, with the same index modulo one million. Letters are read as LLaVA-1.5
gives them, and by the rules of VLMEvalKit (``utils/matching_util.py``) without its judge: where it asks a language
model, the answer names no option. ScienceQA: Lu et al., arXiv:2209.09513, ``llava/eval/eval_science_qa.py`` of
LLaVA-1.5. MMMU, validation (Yue et al., arXiv:2311.16502), as lmms-eval's ``mmmu_val`` asks: the images stand first,
and the text names them. Its answers are read by the rules of ``eval/eval_utils.py``, as lmms-eval at 75571cfe has them;
where these draw a letter at random, an answer names no option.
"""

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any, ClassVar

from subtoken_train.evaluation.metrics.metric import MeanScores, mean, mean_of
from subtoken_train.evaluation.tasks.files import FileRow, read_split
from subtoken_train.evaluation.tasks.image_questions import LETTER_ANSWER, SHORT_ANSWER, ImageQuestions, lettered
from subtoken_train.evaluation.tasks.table import WORDS
from subtoken_train.evaluation.tasks.task import Sample
from subtoken_train.typed import shown
from subtoken_train.types import grouped

LETTERS = "ABCDE"
_LETTER = re.compile(r"[(\uff08]?([A-E])(?:[.:,)\u3002\uff1a\uff0c\u3001\uff09].*)?", re.DOTALL)
_VERBOSE = re.compile(r"answer\s+is\s+\**([A-D])", re.IGNORECASE)
_PUNCTUATION = str.maketrans(dict.fromkeys(".()[],:;!*#{}", " "))


def plain_letter(text: str, options: Mapping[str, str]) -> str | None:
    """Read an answer that is a letter (LLaVA-1.5's form): alone, in brackets, or with a mark and more text after it."""
    match = _LETTER.fullmatch(text.strip())
    return match[1] if match and match[1] in options else None


def vlmevalkit_letter(text: str, options: Mapping[str, str]) -> str | None:
    """Read as VLMEvalKit's ``can_infer``; ``Z`` for an answer that refuses to choose."""
    if any(refusal in text for refusal in WORDS["refusals"]):
        return "Z"
    words = text.translate(_PUNCTUATION).split()
    found = [letter for letter in options if letter in words]
    if len(found) == 1 and words.index(found[0]) > len(words) - 5:  # among the last four words
        return found[0]
    if not found and "Z" in words:
        return "Z"
    match = _VERBOSE.search(text)
    if match and match[1].upper() in options:
        return match[1].upper()
    if len(text) > 2 * sum(map(len, options.values())):
        return None
    named = [letter for letter, option in options.items() if option.lower() in text.lower()]
    return named[0] if len(named) == 1 else None


READINGS: dict[str, Callable[[str, Mapping[str, str]], str | None]] = {
    "": plain_letter,
    "vlmevalkit_": vlmevalkit_letter,
}
"""The rules by the prefix that their scores have."""


_SENTENCE = re.compile(r"The answer is ([A-Z]).")  # the last point stands for any character, as in the original
ROTATION = 1_000_000
"""Rows of one question have the same index modulo this."""


class MMBenchScores(MeanScores):
    """Accuracy over all rows, and over questions whose rotations are all answered right.

    A reference holds ``index``, ``answer`` (a letter) and ``options`` (texts by letter). Scores, each with the prefix
    of its reading: ``accuracy`` over all rows (that the sub-token paper prints this is a reading: its figures are whole
    numbers of 4,329 rows); ``unrotated_accuracy`` over indices below one million; ``circular``: questions all of whose
    rows are right, if one has two (a limited run may lack rotations: too high).
    """

    names = tuple(f"{name}{score}" for score in ("accuracy", "unrotated_accuracy") for name in READINGS)

    @staticmethod
    def figures(prediction: str, reference: Mapping[str, Any]) -> dict[str, float]:
        options, rotated = reference["options"], reference["index"] >= ROTATION
        right = {name: float(read(prediction, options) == reference["answer"]) for name, read in READINGS.items()}
        scores = ("accuracy",) if rotated else ("accuracy", "unrotated_accuracy")
        return {f"{name}{score}": own for score in scores for name, own in right.items()}

    def compute(self) -> dict[str, float]:
        figures = ((reference["index"] % ROTATION, self.figures(said, reference)) for said, reference in self.rows)
        questions = grouped(figures)
        found, rotated = super().compute(), any(len(members) > 1 for members in questions.values())
        for name in READINGS if rotated else ():
            own = [[row[f"{name}accuracy"] for row in members] for members in questions.values()]
            found[f"{name}circular"] = mean([*map(all, own)])
        return found


class ScienceQAScores(MeanScores):
    """Chosen letters: ``accuracy`` by LLaVA's reading, ``llava_image_accuracy`` of samples with an image.

    A reference holds ``answer`` (index of the right choice), ``choices`` (their number) and ``image`` (true, false). A
    sample that was never answered is no sample here, while LLaVA's program counts it as wrong and without an image.
    """

    names = ("accuracy", "llava_image_accuracy")

    @staticmethod
    def figures(prediction: str, reference: Mapping[str, Any]) -> dict[str, float]:
        right = float(llava_choice(prediction, reference["choices"]) == reference["answer"])
        return dict.fromkeys(("accuracy", "llava_image_accuracy")[: 1 + reference["image"]], right)


def llava_letter(text: str) -> str | None:
    """Find LLaVA's letter: alone (no space), before ". " at the start, or in one "The answer is X."; else None."""
    if text in tuple(LETTERS):
        return text
    if len(text) >= 3 and text[0] in LETTERS and text[1:3] == ". ":
        return text[0]
    found: list[str] = _SENTENCE.findall(text)
    return found[0] if len(found) == 1 else None


def llava_choice(text: str, choices: int) -> int:
    """Return the index of the choice that LLaVA reads; -1 where there is no such letter or choice."""
    letter = llava_letter(text)
    return LETTERS[:choices].find(letter) if letter else -1


@dataclass
class MMBench(ImageQuestions):
    """All English rows of the development set, in the words of ``prompt``: ``llava``, ``lmms`` or ``vlmevalkit``."""

    prompt: str = "llava"

    prompts: ClassVar[Mapping[str, Any]] = WORDS["mmbench"]["prompts"]
    """Words of LLaVA-1.5, lmms-eval and VLMEvalKit, whose own are English for Chinese questions too: for a hint, and
    for the question. Odd spaces and lines are theirs."""
    allowed: ClassVar = {"prompt": tuple(prompts)}
    endings: ClassVar[Mapping[str, str]] = WORDS["mmbench"]["english"]
    """Words that ask for the letter, by ``prompt``."""

    def sample(self, row: FileRow, number: int) -> Sample:
        index, answer = int(row.values["index"]), _present(row.values["answer"])
        if answer is None:
            raise self.without_answer(row)
        found = {letter: option for letter in "ABCD" if (option := _present(row.values[letter]))}
        if answer not in found:
            raise ValueError(f"{row.place}: the answer is {answer!r}, and the options are {', '.join(found)}")
        before, words = self.prompts[self.prompt]
        ending = self.endings.get(self.prompt, "")
        asked = words.format(question=row.text("question"), options=lettered(found), ending=ending)
        reference = {"index": index, "answer": answer, "options": found}
        if nan := "".join(letter for letter in "ABCD" if letter not in found and row.values[letter] is not None):
            reference["nan_options"] = nan
        if hint := self.hint(row):
            asked = before.format(hint) + asked
        return self.ask(row, index, asked, reference, max_new_tokens=self.tokens, kind=row.values["category"])

    def hint(self, row: FileRow) -> str | None:
        """Return what stands before the question; None where a row has none."""
        return _present(row.values["hint"])


class MMBenchCN(MMBench):
    """The same in Chinese; "nan" is a hint in lmms-eval's words (``prompt: lmms``), whose scores are a judge's."""

    endings = WORDS["mmbench"]["chinese"]

    def hint(self, row: FileRow) -> str | None:
        given: str | None = row.values["hint"]
        return given if self.prompt == "lmms" else super().hint(row)


def _present(value: Any) -> str | None:
    """Return a cell's text; None for an empty one, which is "nan" in the Hub's file."""
    return None if value is None or str(value).lower() in ("", "nan") else str(value)


@dataclass
class ScienceQA(ImageQuestions):
    """The test questions: with an image (``img``), or all (``full``), of which those without one are asked as text."""

    subset: str = "img"

    subsets: ClassVar = {"img": 2017, "full": 4241}
    allowed: ClassVar = {"subset": tuple(subsets)}

    @property
    def expected_rows(self) -> int:
        return int(self.subsets[self.subset])

    def sample(self, row: FileRow, number: int) -> Sample:
        values = row.values
        answer, choices, image = values["answer"], row.texts("choices"), values["image"]
        if type(answer) is not int or not 0 <= answer < len(choices) <= len(LETTERS):
            raise ValueError(f"{row.place}: the answer is {answer!r}, which is none of the {len(choices)} choices")
        hint = f"Context: {values['hint']}\n" if values["hint"] else ""
        text = f"{hint}{row.text('question')}\n{lettered(choices)}{LETTER_ANSWER}"
        return Sample(
            f"{self.answered}-{number}",
            text if image is None else f"<image>\n{text}",
            {"answer": answer, "choices": len(choices), "image": image is not None},
            () if image is None else (image,),
            kind=values["subject"],
        )

    def parquet_rows(self) -> list[FileRow]:
        return read_split(self, self.answered, self.columns, ["image"], f"ScienceQA-{self.subset.upper()}")


_FRAMES = (("({})", "({})"), ("{} ", " {} "), ("{}.", " {} "))
"""Forms in which a letter may stand, each with the form whose last place then counts."""
_KEYS = ("could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ")
_NUMBERS = (
    re.compile(r"-?\b\d{1,3}(?:,\d{3})+\b"),
    re.compile(r"-?\d+(?:\.\d+)?[eE][+-]?\d+"),
    re.compile(r"-?(?:\d+\.\d+|\.\d+|\d+\b)(?![eE][+-]?\d+)(?![,\d])"),
)


def chosen_letter(text: str, options: Sequence[str]) -> str | None:
    """Return the last letter that is named: bracketed, before a space or full stop, or by its option; else None."""
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
        ends += [end] if end and end not in tuple(":,.!?;'") else []
    ends = ends or [text]
    numbers = [number for end in ends for form in _NUMBERS for number in form.findall(end)]
    return [answer for said in (*ends, *numbers) for answer in normalised(said)]


def mmmu_right(prediction: str, reference: Mapping[str, Any]) -> bool:
    """Tell whether an answer is right; references hold ``answers`` and ``options``, none if open."""
    options, answers = reference["options"], reference["answers"]
    if options:
        return chosen_letter(prediction, options) in answers
    wanted, said = [each for answer in answers for each in normalised(answer)], open_answers(prediction)
    part = any(isinstance(each, str) and each in text for each in wanted for text in said if isinstance(text, str))
    return part or any(each in wanted for each in said if isinstance(each, float))


MMMUAccuracy = mean_of("accuracy", mmmu_right)


class MMMU(ImageQuestions):
    """The validation set; the test set has no public answers."""

    pictures: ClassVar = tuple(f"image_{number}" for number in range(1, 8))

    def sample(self, row: FileRow, number: int) -> Sample:
        name, options = row.text("id"), _python_list(row, "options")
        if (subject := re.fullmatch(r"[^_]+_(.+)_\d+", name)) is None:
            raise ValueError(f"{row.place}: id {name!r} names no subject, as in 'validation_Accounting_1'")
        choice = row.values["question_type"] == "multiple-choice"
        answers = [self.answer(row)] if choice or not self.answer(row).startswith("[") else _python_list(row, "answer")
        if choice and answers[0] not in tuple(ascii_uppercase[: len(options)]):
            raise ValueError(f"{row.place}: the answer is {answers[0]!r}, which is none of the {len(options)} options")
        asked = f"{row.text('question')}\n{lettered(options)}" if choice else row.text("question")
        images = sorted({f"image_{found}" for found in re.findall(r"<image (\d+)>", asked)})
        if unknown := [image for image in images if image not in self.pictures]:
            raise ValueError(f"{row.place}: the question names {unknown[0]}; a row has image_1 to image_7")
        return Sample(
            name,
            "<image>\n" * len(images) + asked + "\n" + (LETTER_ANSWER if choice else SHORT_ANSWER),
            {"options": options if choice else [], "answers": answers},
            tuple(image for column in images for image in row.image(column)),
            max_new_tokens=self.tokens,
            kind=subject[1],
        )


def _python_list(row: FileRow, column: str) -> list[str]:
    """Return the texts of a cell that holds a list as Python writes it."""
    text = row.text(column)
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise ValueError(f"{row.place}: {column} is {shown(text)}, but must be a list of texts; fetch the file again")
    return found
