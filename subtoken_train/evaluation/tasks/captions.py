"""What caption tasks share: one prompt, reference captions, CIDEr."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from subtoken_train.evaluation.metrics.caption_cider import CaptionCider, check_tokenizer
from subtoken_train.evaluation.tasks.task import Sample
from subtoken_train.evaluation.tasks.image_questions import (
    ImageQuestions,
    about_image,
    image_of,
    texts_of,
    without_answer,
)
from subtoken_train.evaluation.tasks.parquet_sets import Row

CAPTION_PROMPT = "Provide a one-sentence caption for the provided image."


@dataclass
class CaptionTask(ImageQuestions):
    """One caption per image, as lmms-eval asks it, scored by CIDEr over the set: a part of it has another scale."""

    primary = "cider"
    answered = "val"
    columns: ClassVar[tuple[str, str]]
    """The image's name and its reference captions."""

    def sample(self, row: Row, number: int) -> Sample:
        """The sample of a row."""
        name, captions = self.columns
        if not row.values[captions]:
            raise without_answer(row, self.answered)
        return Sample(
            str(row.values[name]),
            about_image(CAPTION_PROMPT),
            {"captions": texts_of(row, captions)},
            image_of(row),
            max_new_tokens=64,
            kind="caption",
        )

    def metric(self) -> CaptionCider:
        """CIDEr."""
        return CaptionCider()

    def check_requirements(self) -> None:
        """See ``check_tokenizer``: Java and pycocoevalcap must be there before a model runs."""
        check_tokenizer()
