"""What caption tasks share: one prompt, reference captions, CIDEr."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from subtoken_train.datasets.images import ImageSource
from subtoken_train.evaluation.metrics.caption_cider import CaptionCider, check_tokenizer
from subtoken_train.evaluation.tasks.base import Sample, Task
from subtoken_train.evaluation.tasks.reading import Row, no_answers, unique_ids

CAPTION_PROMPT = "<image>\nProvide a one-sentence caption for the provided image."
MAX_NEW_TOKENS = 64


@dataclass
class CaptionTask(Task):
    """One caption per image, scored by CIDEr over the whole set; a part of the set has figures of another scale."""

    def metric(self) -> CaptionCider:
        """CIDEr."""
        return CaptionCider()

    def check_requirements(self) -> None:
        """See ``check_tokenizer``: Java and pycocoevalcap must be there before a model runs."""
        check_tokenizer()


def caption_samples(rows: Sequence[Row], id_column: str, captions_column: str, split: str) -> list[Sample]:
    """Samples of rows with an ``image``.

    Args:
        rows: of the split.
        id_column: names the image.
        captions_column: its reference captions.
        split: for the message.

    Raises:
        ValueError: an image has no caption, or is there twice.
    """
    unique_ids((str(row.values[id_column]), row.place) for row in rows)
    return [_sample(row, id_column, captions_column, split) for row in rows]


def _sample(row: Row, id_column: str, captions_column: str, split: str) -> Sample:
    captions: list[Any] = [caption for caption in row.values[captions_column] or () if caption]
    image: ImageSource | None = row.values["image"]
    if not captions:
        raise no_answers(row.place, split, "val")
    if image is None:
        raise ValueError(f"{row.place} has no image; fetch the file again")
    return Sample(
        id=str(row.values[id_column]),
        prompt=CAPTION_PROMPT,
        reference={"captions": captions},
        images=(image,),
        max_new_tokens=MAX_NEW_TOKENS,
        kind="caption",
    )
