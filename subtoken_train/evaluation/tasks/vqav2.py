"""VQAv2 (Goyal et al., arXiv:1612.00837): questions about COCO photographs, ten answers each.

Read from lmms-eval's Parquet form, or from the challenge's own two JSON files with COCO's images beside them. The test
splits (test-dev: what LLaVA's table shows) have no public answers; only the challenge's server scores them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from subtoken_train.evaluation.metrics.vqa_accuracy import VQAv2Accuracy
from subtoken_train.evaluation.tasks.file_rows import FileRow, find_file, read_entries, unique_ids
from subtoken_train.evaluation.tasks.image_questions import SHORT_ANSWER, ImageQuestions
from subtoken_train.evaluation.tasks.task import Sample
from subtoken_train.typed import shown

QUESTIONS = "v2_OpenEnded_mscoco_val2014_questions.json"
ANSWERS = "v2_mscoco_val2014_annotations.json"
IMAGES = "val2014"


@dataclass
class VQAv2(ImageQuestions):
    """The validation set, a reading: the sub-token paper names no split, and its figures fit test-dev as well.

    The other values of ``split`` are known, and refused because they cannot be scored here.
    """

    name = "vqav2"
    hub_id = "lmms-lab/VQAv2"
    rows = 214_354
    primary = "llava_accuracy"
    scored_by = VQAv2Accuracy
    answered = "validation"
    columns = ("question_id", "question", "answers", "answer_type")
    where = (
        "Parquet: hf download lmms-lab/VQAv2 --repo-type dataset --local-dir DIR --include 'data/validation-*'. "
        "The challenge's own form, unpacked in DIR: https://s3.amazonaws.com/cvmlp/vqa/mscoco/vqa/"
        "v2_Questions_Val_mscoco.zip, .../v2_Annotations_Val_mscoco.zip, http://images.cocodataset.org/zips/val2014.zip"
    )

    allowed: ClassVar = {"split": ("validation", "testdev", "test")}

    split: str = "validation"

    def __post_init__(self) -> None:
        """Refuse a split without public answers by a ``ValueError``."""
        super().__post_init__()
        if self.split != self.answered:
            raise ValueError(
                f"task vqav2: split {self.split!r} has no answers and cannot be scored; use split {self.answered!r}"
            )

    def sample(self, row: FileRow, number: int) -> Sample:
        """Return the sample of a row or of an annotated question."""
        text = row.text("question") + SHORT_ANSWER
        return self.ask(row, row.values["question_id"], text, self.people(row), kind=row.values["answer_type"])

    def own_rows(self, folder: Path) -> list[FileRow] | None:
        """Join the challenge's two files."""
        if not any((folder / name).is_file() for name in (QUESTIONS, ANSWERS)):
            return None
        paths = find_file(self, folder, QUESTIONS), find_file(self, folder, ANSWERS)
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
            image = folder / IMAGES / f"COCO_{IMAGES}_{_number(row, 'image_id'):012}.jpg"
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
