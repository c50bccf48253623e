"""TextVQA (Singh et al., arXiv:1904.08920): questions about text in photographs.

Two forms are read. LLaVA's: ``llava_textvqa_val_v051_ocr.jsonl`` (of its eval.zip), whose lines hold the whole prompt,
with ``TextVQA_0.5.1_val.json`` for the answers, joined by image and question in lower case, because the lines have no
question ids. And the Parquet form of lmms-eval, whose prompts capitalise the question (and lower the rest of it).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from subtoken_train.datasets.image_sources import inside
from subtoken_train.evaluation.metrics.vqa_accuracy import SoftAccuracy
from subtoken_train.evaluation.tasks.file_rows import FileRow, find_file, read_entries, read_jsonl, unique_ids
from subtoken_train.evaluation.tasks.image_questions import SHORT_ANSWER, ImageQuestions
from subtoken_train.evaluation.tasks.task import Sample

QUESTIONS = "llava_textvqa_val_v051_ocr.jsonl"
ANSWERS = "TextVQA_0.5.1_val.json"
IMAGES = "train_images"
OCR_LINE = "Reference OCR token: "


@dataclass
class TextVQA(ImageQuestions):
    """The validation set.

    Attributes:
        ocr: put the words that a text detector found in the image into the prompt, as LLaVA-1.5's results have it (and
            very probably the paper's); without them the score is lower by a lot, so say which.
    """

    name = "textvqa"
    hub_id = "lmms-lab/textvqa"
    rows = 5000
    primary = "accuracy"
    scored_by = SoftAccuracy
    answered = "validation"
    columns = ("question_id", "question", "answers", "ocr_tokens")
    where = (
        "Parquet: hf download lmms-lab/textvqa --repo-type dataset --local-dir DIR --include 'data/validation-*'. "
        f"LLaVA's form, all in DIR: {QUESTIONS} (folder textvqa of eval.zip, "
        "https://drive.google.com/file/d/1atZSBBrAX54yYpxtVVW33zFvcnaHeFPy), "
        f"https://dl.fbaipublicfiles.com/textvqa/data/{ANSWERS}, and {IMAGES}/ of "
        "https://dl.fbaipublicfiles.com/textvqa/images/train_val_images.zip"
    )

    ocr: bool = True

    def sample(self, row: FileRow, number: int) -> Sample:
        """Return the sample of a row; one of LLaVA's files holds the whole ``text``."""
        if "text" in row.values:
            text = row.text("text")
        else:
            tokens = f"\n{OCR_LINE}{', '.join(row.values['ocr_tokens'] or ())}" if self.ocr else ""
            text = row.text("question").capitalize() + tokens + SHORT_ANSWER
        return self.ask(row, row.values["question_id"], text, self.people(row), max_new_tokens=128)

    def own_rows(self, folder: Path) -> list[FileRow] | None:
        """Join LLaVA's two files."""
        if not any((folder / name).is_file() for name in (QUESTIONS, ANSWERS)):
            return None
        questions = read_jsonl(find_file(self, folder, QUESTIONS), ("question_id", "image", "text"))
        path = find_file(self, folder, ANSWERS)
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
            source = inside(folder / IMAGES, str(row.values["image"]))
            rows.append(waiting.popleft().with_values(text=text, image=source))
        return rows

    def _llava_prompt(self, row: FileRow) -> tuple[str, str]:
        """Return the question alone, and what is asked."""
        question, *rest = row.text("text").split("\n")
        tokens = len(rest) == 2 and rest[0].startswith(OCR_LINE.rstrip())
        if not tokens and (self.ocr or len(rest) != 1):
            raise ValueError(
                f"{row.place}: a text must have a line each for the question, '{OCR_LINE}...' and how to answer "
                f"(the second may be absent with ocr=False); got {row.values['text']!r}"
            )
        return question, "\n".join([question, *rest] if self.ocr else [question, rest[-1]])


def _annotations(path: Path) -> Mapping[tuple[str, str], deque[FileRow]]:
    """Group annotations by image and question; one that was put twice has two, in order (LLaVA: both get the last)."""
    found: dict[tuple[str, str], deque[FileRow]] = defaultdict(deque)
    rows = read_entries(path, "data", ("image_id", "question", "question_id"))
    unique_ids((str(row.values["question_id"]), row.place) for row in rows)
    for row in rows:
        found[row.values["image_id"], row.text("question").lower()].append(row)
    return found
