"""Tasks of one image and one question a row: their base, and those whose files and rules need no more than it.

Multiple choice (AI2D, MMStar, RealWorldQA, SEED-Bench) is asked and scored as in lmms-eval:
``tasks/{ai2d,mmstar,realworldqa,seedbench}`` and ``_task_utils/mcq_extract.py`` at 75571cfe, with the words of its
default models. TextVQA is read in LLaVA's form, too: ``llava_textvqa_val_v051_ocr.jsonl``, whose lines hold the whole
prompt, with ``TextVQA_0.5.1_val.json`` for the answers, joined by image and question in lower case, because the lines
have no question ids. The Parquet form is lmms-eval's, whose prompts of TextVQA capitalise the question (and lower the
rest of it); GQA's questions and images are two configurations of it.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Any, ClassVar

from subtoken_train.datasets.image_sources import inside
from subtoken_train.evaluation.metrics import short_answers
from subtoken_train.evaluation.metrics.metric import mean_of
from subtoken_train.evaluation.tasks import files
from subtoken_train.evaluation.tasks.files import FileRow, read_split, task_source
from subtoken_train.evaluation.tasks.table import WORDS
from subtoken_train.evaluation.tasks.task import Sample, Task
from subtoken_train.types import grouped

SHORT_ANSWER = "\nAnswer the question using a single word or phrase."
LETTER_ANSWER = "\nAnswer with the option's letter from the given choices directly."
"""LLaVA-1.5's words for short answers and for letters; lmms-eval's default too."""


@dataclass
class ImageQuestions(Task):
    """A benchmark of one question and its image a row: its row of the table says it, and methods where it differs."""

    modality = "image"
    config: ClassVar[str | None] = None  # the set's configuration; None: its default one
    pictures: ClassVar[tuple[str, ...]] = ("image",)  # its columns of images; a question is asked about the first one
    named: ClassVar[str | None] = None  # column of ids; None: a sample's id is its place in the files, from 0
    kinds: ClassVar[str | None] = None
    """Column of what scores are also shown by, or of a list of it; None, or an empty cell: ``question``."""
    ending: ClassVar[str] = SHORT_ANSWER  # words after the question

    def samples(self) -> Sequence[Sample]:
        source = task_source(self)
        rows = self.own_rows(source) if isinstance(source, Path) else None
        return [self.sample(row, n) for n, row in enumerate(self.parquet_rows() if rows is None else rows)]

    def own_rows(self, folder: Path) -> list[FileRow] | None:
        """Return the rows of a folder with files of the benchmark's own form; None where it has none of those."""
        return None

    def parquet_rows(self) -> list[FileRow]:
        """Return the rows of the Parquet set."""
        return read_split(self, self.answered, self.columns, self.pictures, self.config)

    def sample(self, row: FileRow, number: int) -> Sample:
        """Return the sample of one row, whose number in the whole split counts from 0."""
        name = number if self.named is None else row.values[self.named]
        text, reference, kind = self.question(row), self.reference(row), self.kind(row)
        return self.ask(row, name, text, reference, max_new_tokens=self.tokens, kind=kind)

    def ask(self, row: FileRow, name: object, text: str, reference: Mapping[str, Any], **others: Any) -> Sample:
        """Make a sample: the row's image, then ``text``; ``name`` is its id, and ``others`` are more of its fields."""
        return Sample(str(name), f"<image>\n{text}", reference, row.image(self.pictures[0]), **others)

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

    ending = "\nAnswer the question with a single word."
    writers: ClassVar = {"human_test": "human", "augmented_test": "augmented"}

    def reference(self, row: FileRow) -> dict[str, Any]:
        return {"answer": self.answer(row), "kind": self.kind(row)}

    def kind(self, row: FileRow) -> str:
        if (label := row.values["type"]) not in self.writers:
            raise ValueError(f"{row.place}: type {label!r}; allowed: {', '.join(self.writers)}")
        return str(self.writers[label])


class VizWiz(ImageQuestions):
    """VizWiz-VQA (Gurari et al., arXiv:1802.08218), validation; questions are capitalised as in lmms-eval."""

    ending = f"\nWhen the provided information is insufficient, respond with 'Unanswerable'.{SHORT_ANSWER}"

    def question(self, row: FileRow) -> str:
        return row.text("question").capitalize() + self.ending


class OCRBench(ImageQuestions):
    """OCRBench (Liu et al., arXiv:2305.07895): texts, forms, formulas by hand; its score is 1,000 ``accuracy``."""

    def question(self, row: FileRow) -> str:
        return row.text("question").strip()

    def reference(self, row: FileRow) -> dict[str, Any]:
        return {"answers": self.answers(row, "answer"), "formula": row.values["dataset"] == "HME100k"}


_LETTERS = tuple("ABCD")
_BEGINS = re.compile(r"\s*([A-Z])\.")
_STATIC_FRAMES = ((3, "{})"), (4, "{}:"), (5, "{}."), (6, "({})"), (2, "{} "))


def best_placed_letter(text: str, letters: Iterable[str]) -> str | None:
    """Return lmms-eval's ``extract_mcq_answer``: the letter in the most telling place, the last among equals."""
    text = text.strip()
    for mark in ",.!?;:'\"":
        text = text.strip(mark)
    padded, bare = f" {text} ", text.strip()
    letters, places = tuple(letters), list[tuple[int, int, str]]()
    for letter in letters:
        frames = ((rank, frame.format(letter)) for rank, frame in _STATIC_FRAMES)
        places += [(rank, padded.rfind(framed), letter) for rank, framed in frames if framed in padded]
        after = (padded.lower().find(said) + len(said) for said in WORDS["answer_phrases"] if said in padded.lower())
        places += [(7, padded.find(letter, start), letter) for start in after if letter in padded[start:]]
        places += [(10, 0, letter)] if bare.startswith(letter) and not bare[1:2].isalpha() else []
        places += [(9, len(padded) - 1, letter)] if bare.endswith(letter) and not bare[-2:-1].isalpha() else []
    places = places or [(0, padded.rfind(letter), letter) for letter in letters if letter in padded]
    return max(places)[2] if places else None


def placed(text: str, answer: str) -> bool:
    """Return whether the letter in the most telling place is the answer (MMStar's rule)."""
    return best_placed_letter(text, _LETTERS) == answer.strip().upper()


def letter_right(text: str, task: str, answer: str) -> bool:
    """Return whether a text gives the answer, by the rule of its task."""
    if task == "ai2d":  # a letter with a full stop begins the text, or is the text but for case and punctuation
        begins, bare = _BEGINS.match(text), short_answers.without_punctuation
        return bare(begins[1] if begins else text) == bare(answer)
    answer = answer.strip()
    if task == "seedbench":  # the first character is the letter, in either case
        return text.strip()[:1].lower() == answer.lower()
    # realworldqa: ``placed`` for a letter; another answer is the text but for case and full stops
    return placed(text, answer) if answer.upper() in _LETTERS else text.lower().strip().rstrip(".") == answer.lower()


LetterAccuracy = mean_of("accuracy", lambda said, of: letter_right(said, of["task"], of["answer"]))
"""The share of right answers, by the rule of the reference's ``task``; it also holds ``answer``."""


MMStarAccuracy = mean_of("accuracy", lambda said, of: placed(said, of["answer"]))
"""Over all questions, as the paper, whose six categories are of one size."""


class ImageChoices(ImageQuestions):
    """A set whose answers are read by a rule of ``LetterAccuracy``."""

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

    dimensions: ClassVar = WORDS["seedbench"]

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


class GQA(ImageQuestions):
    """GQA (Hudson & Manning, arXiv:1902.09506): testdev's balanced questions, ``binary`` (yes or no) or ``open``."""

    def reference(self, row: FileRow) -> dict[str, Any]:
        return {"answer": self.answer(row)}

    def kind(self, row: FileRow) -> str:
        return "binary" if self.answer(row) in ("yes", "no") else "open"

    def parquet_rows(self) -> list[FileRow]:
        questions = read_split(self, self.answered, self.columns, config="testdev_balanced_instructions")
        pictures = read_split(self, self.answered, ["id"], ["image"], config="testdev_balanced_images")
        files.unique_ids((str(row.values["id"]), row.place) for row in pictures)
        images = {row.values["id"]: row.values["image"] for row in pictures}
        for row in questions:
            if row.values["imageId"] not in images:
                raise ValueError(f"{row.place}: image {row.values['imageId']} is not in testdev_balanced_images")
        return [row.with_values(image=images[row.values["imageId"]]) for row in questions]


@dataclass
class TextVQA(ImageQuestions):
    """TextVQA (Singh et al., arXiv:1904.08920), validation: questions about text in photographs.

    ``ocr`` puts the words that a text detector found into the prompt, as LLaVA-1.5's results have it (and very probably
    the paper's); without them the score is lower by a lot, so say which.
    """

    ocr: bool = True

    questions: ClassVar = "llava_textvqa_val_v051_ocr.jsonl"
    official: ClassVar = "TextVQA_0.5.1_val.json"
    ocr_line: ClassVar = "Reference OCR token: "

    def question(self, row: FileRow) -> str:
        if "text" in row.values:  # LLaVA's files hold it
            return row.text("text")
        tokens = f"\n{self.ocr_line}{', '.join(row.values['ocr_tokens'] or ())}" if self.ocr else ""
        return row.text("question").capitalize() + tokens + SHORT_ANSWER

    def own_rows(self, folder: Path) -> list[FileRow] | None:
        if not any((folder / name).is_file() for name in (self.questions, self.official)):
            return None
        questions = files.read_jsonl(files.find_file(self, folder, self.questions), ("question_id", "image", "text"))
        path = files.find_file(self, folder, self.official)
        notes = files.read_entries(path, "data", ("image_id", "question", "question_id"))
        files.unique_ids((str(note.values["question_id"]), note.place) for note in notes)
        keys = ((note.values["image_id"], note.text("question").lower()) for note in notes)
        known = grouped(zip(keys, notes, strict=True))  # a question put twice has two, in order
        rows = []
        for row in questions:
            question, *rest = row.text("text").split("\n")
            tokens = len(rest) == 2 and rest[0].startswith(self.ocr_line.rstrip())
            if not tokens and (self.ocr or len(rest) != 1):
                lines = f"a line each for the question, '{self.ocr_line}...' (unless ocr=False) and how to answer"
                raise ValueError(f"{row.place}: a text must have {lines}; got {row.values['text']!r}")
            text = "\n".join([question, *rest] if self.ocr else [question, rest[-1]])
            image = row.values["question_id"]
            if not (waiting := known.get((image, question.lower()))):
                lacks = f"{path} has no (further) answers for question {question!r} of image {image!r}"
                raise ValueError(f"{row.place}: {lacks}; the two files must be of the same split")
            source = inside(folder / "train_images", row.text("image"))
            rows.append(waiting.pop(0).with_values(text=text, image=source))
        return rows


@dataclass
class VQAv2(ImageQuestions):
    """VQAv2 (arXiv:1612.00837), validation: a reading, since the sub-token paper names no split."""

    split: str = "validation"

    allowed: ClassVar = {"split": ("validation",)}
