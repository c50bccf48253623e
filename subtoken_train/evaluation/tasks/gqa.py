"""GQA (Hudson & Manning, arXiv:1902.09506): 12,578 balanced questions of testdev.

Read from lmms-eval's Parquet form (questions and images are two configurations), or from GQA's own
``testdev_balanced_questions.json`` with its images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from subtoken_train.evaluation.metrics.short_answers import ExactMatch
from subtoken_train.evaluation.tasks.base import Sample
from subtoken_train.evaluation.tasks.image_questions import (
    SHORT_ANSWER,
    ImageQuestions,
    about_image,
    answer_of,
    image_of,
    text_of,
)
from subtoken_train.evaluation.tasks.reading import Row, read_split, task_source, unique_ids
from subtoken_train.evaluation.tasks.text_files import read_named

QUESTIONS = "testdev_balanced_questions.json"
IMAGES = "images"


@dataclass
class GQA(ImageQuestions):
    """The questions of testdev; the kind is ``binary`` (the answer is yes or no) or ``open``."""

    name = "gqa"
    hub_id = "lmms-lab/GQA"
    rows = 12_578
    primary = "accuracy"
    answered = "testdev"
    columns = ("id", "imageId", "question", "answer")
    where = (
        "Parquet: hf download lmms-lab/GQA --repo-type dataset --local-dir DIR --include 'testdev_balanced_*/*'. "
        f"GQA's own form, unpacked in DIR: {QUESTIONS} of https://downloads.cs.stanford.edu/nlp/data/gqa/"
        f"questions1.2.zip, and {IMAGES}/ of https://downloads.cs.stanford.edu/nlp/data/gqa/images.zip"
    )

    def samples(self) -> Sequence[Sample]:
        """All samples in the order of the files.

        Raises:
            ValueError: a file is missing, truncated or malformed, an id is there twice, or an image is unknown.
        """
        source = task_source(self)
        own = isinstance(source, Path) and (source / QUESTIONS).is_file()
        rows = _own_rows(Path(source)) if own else self._joined_rows()
        unique_ids((str(row.values["id"]), row.place) for row in rows)
        return [self.sample(row, number) for number, row in enumerate(rows)]

    def metric(self) -> ExactMatch:
        """Exact match in two readings."""
        return ExactMatch()

    def sample(self, row: Row, number: int) -> Sample:
        """The sample of a row."""
        answer = answer_of(row, self.answered)
        return Sample(
            str(row.values["id"]),
            about_image(text_of(row, "question") + SHORT_ANSWER),
            {"answer": answer},
            image_of(row),
            kind="binary" if answer in ("yes", "no") else "open",
        )

    def _joined_rows(self) -> list[Row]:
        questions = read_split(self, self.answered, self.columns, config="testdev_balanced_instructions")
        pictures = read_split(self, self.answered, ["id"], ["image"], config="testdev_balanced_images")
        unique_ids((str(row.values["id"]), row.place) for row in pictures)
        images = {row.values["id"]: row.values["image"] for row in pictures}
        for row in questions:
            if row.values["imageId"] not in images:
                raise ValueError(f"{row.place}: image {row.values['imageId']} is not in testdev_balanced_images")
        return [Row({**row.values, "image": images[row.values["imageId"]]}, row.place) for row in questions]


def _own_rows(folder: Path) -> list[Row]:
    entries = read_named(folder / QUESTIONS, ("imageId", "question", "answer"))
    return [
        Row({**row.values, "id": name, "image": folder / IMAGES / f"{row.values['imageId']}.jpg"}, row.place)
        for name, row in entries.items()
    ]
