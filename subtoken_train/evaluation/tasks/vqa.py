"""GQA, TextVQA and VQAv2: questions about photographs that people answered, in the Hub's form; TextVQA in LLaVA's, too.

That is: ``llava_textvqa_val_v051_ocr.jsonl``, whose lines hold the whole prompt, with
``TextVQA_0.5.1_val.json`` for the answers, joined by image and question in lower case, because the lines have no
question ids. The Parquet form is lmms-eval's, whose prompts of TextVQA capitalise the question (and lower the rest of
it); GQA's questions and images are two configurations of it.
"""

from collections import defaultdict, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from subtoken_train.datasets.image_sources import inside
from subtoken_train.evaluation.metrics.short_answers import ExactMatch, SoftAccuracy, VQAv2Accuracy
from subtoken_train.evaluation.tasks import files
from subtoken_train.evaluation.tasks.files import FileRow, find_file, read_entries, read_split, unique_ids
from subtoken_train.evaluation.tasks.image_questions import SHORT_ANSWER, ImageQuestions


class GQA(ImageQuestions):
    """GQA (Hudson & Manning, arXiv:1902.09506): testdev's balanced questions, ``binary`` (yes or no) or ``open``."""

    scored_by = ExactMatch

    def reference(self, row: FileRow) -> dict[str, Any]:
        return {"answer": self.answer(row)}

    def kind(self, row: FileRow) -> str:
        return "binary" if self.answer(row) in ("yes", "no") else "open"

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
        notes = read_entries(path, "data", ("image_id", "question", "question_id"))
        unique_ids((str(note.values["question_id"]), note.place) for note in notes)
        known = defaultdict[tuple[str, str], deque[FileRow]](deque)  # a question put twice has two, in order
        for note in notes:
            known[note.values["image_id"], note.text("question").lower()].append(note)
        rows = []
        for row in questions:
            question, *rest = row.text("text").split("\n")
            tokens = len(rest) == 2 and rest[0].startswith(self.ocr_line.rstrip())
            if not tokens and (self.ocr or len(rest) != 1):
                lines = f"a line each for the question, '{self.ocr_line}...' (unless ocr=False) and how to answer"
                raise ValueError(f"{row.place}: a text must have {lines}; got {row.values['text']!r}")
            text = "\n".join([question, *rest] if self.ocr else [question, rest[-1]])
            image = row.values["question_id"]
            waiting = known.get((image, question.lower()))
            if not waiting:
                lacks = f"{path} has no (further) answers for question {question!r} of image {image!r}"
                raise ValueError(f"{row.place}: {lacks}; the two files must be of the same split")
            source = inside(folder / "train_images", row.text("image"))
            rows.append(waiting.popleft().with_values(text=text, image=source))
        return rows


@dataclass
class VQAv2(ImageQuestions):
    """VQAv2 (arXiv:1612.00837), validation: a reading, since the sub-token paper names no split."""

    split: str = "validation"

    scored_by = VQAv2Accuracy
    allowed: ClassVar = {"split": ("validation",)}
