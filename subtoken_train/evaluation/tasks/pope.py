"""POPE (Li et al., arXiv:2305.10355): is this object in this COCO photograph?

Read from lmms-eval's Parquet form, or from the benchmark's own ``coco_pope_*.json`` (JSON lines) with COCO's images.
Both have 3,000 questions in each of three categories. LLaVA-1.5's paper used a random file of 2,910; the paper of this
package, the 9,000.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from subtoken_train.errors import unknown_name
from subtoken_train.evaluation.metrics.yes_no import POPE_CATEGORIES, POPEScores
from subtoken_train.evaluation.tasks.base import Sample
from subtoken_train.evaluation.tasks.image_questions import (
    SHORT_ANSWER,
    ImageQuestions,
    about_image,
    answer_of,
    image_of,
    text_of,
)
from subtoken_train.evaluation.tasks.reading import Row, find_file, parquet_files, read_split, task_source, unique_ids
from subtoken_train.evaluation.tasks.text_files import read_jsonl

IMAGES = "val2014"


@dataclass
class POPE(ImageQuestions):
    """Questions of one or all categories.

    Attributes:
        category: ``all``, ``adversarial``, ``popular`` or ``random``.
    """

    name = "pope"
    hub_id = "lmms-lab/POPE"
    rows = 9000
    primary = "accuracy"
    answered = "test"
    columns = ("question_id", "question", "answer", "category")
    where = (
        "Parquet: hf download lmms-lab/POPE --repo-type dataset --local-dir DIR. The benchmark's own form, all in DIR: "
        "output/coco/coco_pope_{random,popular,adversarial}.json of https://github.com/AoiDragon/POPE, and "
        f"{IMAGES}/ of http://images.cocodataset.org/zips/val2014.zip"
    )

    category: str = "all"

    def __post_init__(self) -> None:
        """Refuse an unknown category.

        Raises:
            ValueError: there is no such category.
        """
        if self.category not in ("all", *POPE_CATEGORIES):
            raise unknown_name("category of pope", self.category, ("all", *POPE_CATEGORIES))

    @property
    def expected_rows(self) -> int:
        """Each category has 3,000."""
        return 3000 * len(self._categories)

    def samples(self) -> Sequence[Sample]:
        """All samples, category by category in the benchmark's own form, else in the order of the files.

        Raises:
            ValueError: a file is missing, truncated or malformed, or an id is there twice.
        """
        source = task_source(self)
        if not isinstance(source, Path) or parquet_files(source, self.answered):
            rows = read_split(self, self.answered, self.columns, ["image"])
        elif any((source / "Full").glob("*.parquet")):
            rows = [row for name in self._categories for row in read_split(self, name, self.columns, ["image"], "Full")]
        else:
            rows = [row for name in self._categories for row in self._own_rows(source, name)]
        rows = [row for row in rows if row.values["category"] in self._categories]
        samples = [self.sample(row, number) for number, row in enumerate(rows)]
        unique_ids((sample.id, row.place) for sample, row in zip(samples, rows, strict=True))
        return samples

    def metric(self) -> POPEScores:
        """Accuracy, F1 and the rest."""
        return POPEScores()

    def sample(self, row: Row, number: int) -> Sample:
        """The sample of a row; question ids are unique within a category only."""
        category, label = row.values["category"], answer_of(row, self.answered).lower().strip()
        if label not in ("yes", "no"):
            raise ValueError(f"{row.place}: the answer is {label!r}; POPE's are yes and no")
        return Sample(
            f"{category}/{row.values['question_id']}",
            about_image(text_of(row, "question").strip() + SHORT_ANSWER),
            {"label": label, "category": category},
            image_of(row),
            kind=category,
        )

    @property
    def _categories(self) -> tuple[str, ...]:
        return POPE_CATEGORIES if self.category == "all" else (self.category,)

    def _own_rows(self, folder: Path, category: str) -> list[Row]:
        name = f"coco_pope_{category}.json"
        lines = read_jsonl(find_file(self, folder, name, f"coco/{name}"), ("question_id", "image", "text", "label"))
        return [
            Row(
                {
                    "question_id": line.values["question_id"],
                    "question": line.values["text"],
                    "answer": line.values["label"],
                    "category": category,
                    "image": folder / IMAGES / text_of(line, "image"),
                },
                line.place,
            )
            for line in lines
        ]
