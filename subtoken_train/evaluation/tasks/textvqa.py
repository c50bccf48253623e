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
from typing import Any

from subtoken_train.datasets.images import ImageSource, inside
from subtoken_train.evaluation.metrics.vqa_accuracy import SoftAccuracy
from subtoken_train.evaluation.tasks.base import Sample
from subtoken_train.evaluation.tasks.image_questions import (
    SHORT_ANSWER,
    ImageQuestions,
    about_image,
    image_of,
    people_answers,
    text_of,
)
from subtoken_train.evaluation.tasks.reading import Row, find_file, unique_ids
from subtoken_train.evaluation.tasks.text_files import read_entries, read_jsonl

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
    answered = "validation"
    columns = ("question_id", "question", "answers", "ocr_tokens")
    own_files = (QUESTIONS, ANSWERS)
    where = (
        "Parquet: hf download lmms-lab/textvqa --repo-type dataset --local-dir DIR --include 'data/validation-*'. "
        f"LLaVA's form, all in DIR: {QUESTIONS} (folder textvqa of eval.zip, "
        "https://drive.google.com/file/d/1atZSBBrAX54yYpxtVVW33zFvcnaHeFPy), "
        f"https://dl.fbaipublicfiles.com/textvqa/data/{ANSWERS}, and {IMAGES}/ of "
        "https://dl.fbaipublicfiles.com/textvqa/images/train_val_images.zip"
    )

    ocr: bool = True

    def metric(self) -> SoftAccuracy:
        """Soft accuracy over ten people's answers."""
        return SoftAccuracy()

    def sample(self, row: Row, number: int) -> Sample:
        """The sample of a Parquet row."""
        tokens = f"\n{OCR_LINE}{', '.join(row.values['ocr_tokens'] or ())}" if self.ocr else ""
        text = text_of(row, "question").capitalize() + tokens + SHORT_ANSWER
        return _sample(str(row.values["question_id"]), text, people_answers(row, self.answered), image_of(row))

    def own_samples(self, folder: Path) -> list[Sample]:
        """LLaVA's two files; see ``ImageQuestions``."""
        questions = read_jsonl(find_file(self, folder, QUESTIONS), ("question_id", "image", "text"))
        path = find_file(self, folder, ANSWERS)
        known = _annotations(path)
        samples = []
        for row in questions:
            question, text = self._llava_prompt(row)
            image = row.values["question_id"]
            waiting = known.get((image, question.lower()))
            if not waiting:
                raise ValueError(
                    f"{row.place}: {path} has no (further) answers for question {question!r} of image {image!r}; "
                    "the two files must be of the same split"
                )
            annotation = waiting.popleft()
            answers = people_answers(annotation, self.answered)
            source = inside(folder / IMAGES, str(row.values["image"]))
            samples.append(_sample(str(annotation.values["question_id"]), text, answers, (source,)))
        return samples

    def _llava_prompt(self, row: Row) -> tuple[str, str]:
        """The question alone, and what is asked."""
        question, *rest = text_of(row, "text").split("\n")
        tokens = len(rest) == 2 and rest[0].startswith(OCR_LINE.rstrip())
        if not tokens and (self.ocr or len(rest) != 1):
            raise ValueError(
                f"{row.place}: a text must have a line each for the question, '{OCR_LINE}...' and how to answer "
                f"(the second may be absent with ocr=False); got {row.values['text']!r}"
            )
        return question, "\n".join([question, *rest] if self.ocr else [question, rest[-1]])


def _annotations(path: Path) -> Mapping[tuple[str, str], deque[Row]]:
    """By image and question; a question that was put twice has two, taken in order (LLaVA: both get the last)."""
    found: dict[tuple[str, str], deque[Row]] = defaultdict(deque)
    rows = read_entries(path, "data", ("image_id", "question", "question_id"))
    unique_ids((str(row.values["question_id"]), row.place) for row in rows)
    for row in rows:
        found[row.values["image_id"], text_of(row, "question").lower()].append(row)
    return found


def _sample(name: str, text: str, reference: Mapping[str, Any], images: tuple[ImageSource]) -> Sample:
    return Sample(name, about_image(text), reference, images, max_new_tokens=128)
