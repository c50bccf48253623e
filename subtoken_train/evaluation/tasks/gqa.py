"""GQA (Hudson & Manning, arXiv:1902.09506): 12,578 balanced questions of testdev.

Read from lmms-eval's Parquet form (questions and images are two configurations), or from GQA's own
``testdev_balanced_questions.json`` with its images.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from subtoken_train.evaluation.metrics.short_answers import ExactMatch
from subtoken_train.evaluation.tasks.file_rows import FileRow, read_named, unique_ids
from subtoken_train.evaluation.tasks.image_questions import SHORT_ANSWER, ImageQuestions
from subtoken_train.evaluation.tasks.table_files import read_split
from subtoken_train.evaluation.tasks.task import Sample

QUESTIONS = "testdev_balanced_questions.json"
IMAGES = "images"


@dataclass
class GQA(ImageQuestions):
    """The questions of testdev; the kind is ``binary`` (the answer is yes or no) or ``open``."""

    name = "gqa"
    hub_id = "lmms-lab/GQA"
    rows = 12_578
    primary = "accuracy"
    scored_by = ExactMatch
    answered = "testdev"
    columns = ("id", "imageId", "question", "answer")
    where = (
        "Parquet: hf download lmms-lab/GQA --repo-type dataset --local-dir DIR --include 'testdev_balanced_*/*'. "
        f"GQA's own form, unpacked in DIR: {QUESTIONS} of https://downloads.cs.stanford.edu/nlp/data/gqa/"
        f"questions1.2.zip, and {IMAGES}/ of https://downloads.cs.stanford.edu/nlp/data/gqa/images.zip"
    )

    def sample(self, row: FileRow, number: int) -> Sample:
        """Return the sample of a row."""
        answer = self.answer(row)
        kind = "binary" if answer in ("yes", "no") else "open"
        return self.ask(row, row.values["id"], row.text("question") + SHORT_ANSWER, {"answer": answer}, kind=kind)

    def own_rows(self, folder: Path) -> list[FileRow] | None:
        """Return GQA's own file, and where its images are."""
        if not (folder / QUESTIONS).is_file():
            return None
        entries = read_named(folder / QUESTIONS, ("imageId", "question", "answer"))
        paths = {name: folder / IMAGES / f"{row.values['imageId']}.jpg" for name, row in entries.items()}
        return [row.with_values(id=name, image=paths[name]) for name, row in entries.items()]

    def parquet_rows(self) -> list[FileRow]:
        """Return the questions, joined with the other configuration's images."""
        questions = read_split(self, self.answered, self.columns, config="testdev_balanced_instructions")
        pictures = read_split(self, self.answered, ["id"], ["image"], config="testdev_balanced_images")
        unique_ids((str(row.values["id"]), row.place) for row in pictures)
        images = {row.values["id"]: row.values["image"] for row in pictures}
        for row in questions:
            if row.values["imageId"] not in images:
                raise ValueError(f"{row.place}: image {row.values['imageId']} is not in testdev_balanced_images")
        return [row.with_values(image=images[row.values["imageId"]]) for row in questions]
