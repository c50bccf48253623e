"""GQA, TextVQA and VQAv2: questions about photographs that people answered, in the Hub's form and in their own.

TextVQA's own form is LLaVA's: ``llava_textvqa_val_v051_ocr.jsonl``, whose lines hold the whole prompt, with
``TextVQA_0.5.1_val.json`` for the answers, joined by image and question in lower case, because the lines have no
question ids. The Parquet form is lmms-eval's, whose prompts of TextVQA capitalise the question (and lower the rest of
it); GQA's questions and images are two configurations of it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from subtoken_train.datasets.image_sources import inside
from subtoken_train.evaluation.metrics.short_answers import ExactMatch, SoftAccuracy, VQAv2Accuracy
from subtoken_train.evaluation.tasks import files
from subtoken_train.evaluation.tasks.files import FileRow, find_file, read_entries, read_split, unique_ids
from subtoken_train.evaluation.tasks.image_questions import SHORT_ANSWER, ImageQuestions
from subtoken_train.typed import shown


class GQA(ImageQuestions):
    """GQA (Hudson & Manning, arXiv:1902.09506): testdev's balanced questions, ``binary`` (yes or no) or ``open``."""

    scored_by = ExactMatch
    questions = "testdev_balanced_questions.json"

    def reference(self, row: FileRow) -> dict[str, Any]:
        return {"answer": self.answer(row)}

    def kind(self, row: FileRow) -> str:
        return "binary" if self.answer(row) in ("yes", "no") else "open"

    def own_rows(self, folder: Path) -> list[FileRow] | None:
        if not (folder / self.questions).is_file():
            return None
        entries = files.read_named(folder / self.questions, self.columns[1:])
        paths = {name: folder / "images" / f"{row.values['imageId']}.jpg" for name, row in entries.items()}
        return [row.with_values(id=name, image=paths[name]) for name, row in entries.items()]

    def parquet_rows(self) -> list[FileRow]:
        questions = read_split(self, self.answered, self.columns, config="testdev_balanced_instructions")
        pictures = read_split(self, self.answered, ["id"], ["image"], config="testdev_balanced_images")
        unique_ids((str(row.values["id"]), row.place) for row in pictures)
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

    scored_by = SoftAccuracy
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
        questions = files.read_jsonl(find_file(self, folder, self.questions), ("question_id", "image", "text"))
        path = find_file(self, folder, self.official)
        known = _annotations(path)
        rows = []
        for row in questions:
            question, text = self._llava_prompt(row)
            image = row.values["question_id"]
            waiting = known.get((image, question.lower()))
            if not waiting:
                raise ValueError(
                    f"{row.place}: {path} has no (further) answers for question {question!r} of image {image!r}; "
                    "the two files must be of the same split"
                )
            source = inside(folder / "train_images", str(row.values["image"]))
            rows.append(waiting.popleft().with_values(text=text, image=source))
        return rows

    def _llava_prompt(self, row: FileRow) -> tuple[str, str]:
        question, *rest = row.text("text").split("\n")
        tokens = len(rest) == 2 and rest[0].startswith(self.ocr_line.rstrip())
        if not tokens and (self.ocr or len(rest) != 1):
            raise ValueError(
                f"{row.place}: a text must have a line each for the question, '{self.ocr_line}...' and how to answer "
                f"(the second may be absent with ocr=False); got {row.values['text']!r}"
            )
        return question, "\n".join([question, *rest] if self.ocr else [question, rest[-1]])


def _annotations(path: Path) -> dict[tuple[str, str], deque[FileRow]]:
    """Group annotations by image and question; one put twice has two, in order (LLaVA: both get the last)."""
    found: dict[tuple[str, str], deque[FileRow]] = defaultdict(deque)
    rows = read_entries(path, "data", ("image_id", "question", "question_id"))
    unique_ids((str(row.values["question_id"]), row.place) for row in rows)
    for row in rows:
        found[row.values["image_id"], row.text("question").lower()].append(row)
    return found


@dataclass
class VQAv2(ImageQuestions):
    """VQAv2 (Goyal et al., arXiv:1612.00837): questions about COCO photographs, ten answers each.

    The validation set, a reading: the sub-token paper names no split, and its figures fit test-dev as well. The other
    values of ``split`` have no public answers and are refused.
    """

    split: str = "validation"

    scored_by = VQAv2Accuracy
    allowed: ClassVar = {"split": ("validation", "testdev", "test")}
    own_files: ClassVar = ("v2_OpenEnded_mscoco_val2014_questions.json", "v2_mscoco_val2014_annotations.json")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split != self.answered:
            raise ValueError(
                f"task vqav2: split {self.split!r} has no answers and cannot be scored; use split {self.answered!r}"
            )

    def own_rows(self, folder: Path) -> list[FileRow] | None:
        if not any((folder / name).is_file() for name in self.own_files):
            return None
        paths = [find_file(self, folder, name) for name in self.own_files]
        questions = _by_id(read_entries(paths[0], "questions", ("question_id", "image_id", "question")))
        annotations = _by_id(read_entries(paths[1], "annotations", ("question_id", "answers", "answer_type")))
        for asked, path, others in ((questions, paths[1], annotations), (annotations, paths[0], questions)):
            if strangers := asked.keys() - others.keys():
                first = asked[min(strangers)]
                raise ValueError(
                    f"{first.place}: question {min(strangers)} is not in {path}; the two must be of the same split"
                )
        rows = []
        for name, row in questions.items():
            image = folder / "val2014" / f"COCO_val2014_{_number(row, 'image_id'):012}.jpg"
            rows.append(annotations[name].with_values(question=row.values["question"], image=image))
        return rows


def _by_id(rows: list[FileRow]) -> dict[int, FileRow]:
    unique_ids((str(row.values["question_id"]), row.place) for row in rows)
    return {_number(row, "question_id"): row for row in rows}


def _number(row: FileRow, column: str) -> int:
    value = row.values[column]
    if type(value) is not int:
        raise ValueError(f"{row.place}: {column} is {shown(value)}; it must be a whole number")
    return value
