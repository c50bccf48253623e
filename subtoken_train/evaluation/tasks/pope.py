"""POPE (Li et al., arXiv:2305.10355): is this object in this COCO photograph?

Read from lmms-eval's Parquet form, or from the benchmark's own ``coco_pope_*.json`` (JSON lines) with COCO's images.
Both have 3,000 questions in each of three categories. LLaVA-1.5's paper used a random file of 2,910; the paper of this
package, the 9,000.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from subtoken_train.evaluation.metrics.pope_scores import POPE_CATEGORIES, POPEScores
from subtoken_train.evaluation.tasks.file_rows import FileRow, find_file, task_source
from subtoken_train.evaluation.tasks.image_questions import SHORT_ANSWER, ImageQuestions
from subtoken_train.evaluation.tasks.parquet_sets import parquet_files, read_split
from subtoken_train.evaluation.tasks.task import Sample
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
    scored_by = POPEScores
    answered = "test"
    columns = ("question_id", "question", "answer", "category")
    where = (
        "Parquet: hf download lmms-lab/POPE --repo-type dataset --local-dir DIR. The benchmark's own form, all in DIR: "
        "output/coco/coco_pope_{random,popular,adversarial}.json of https://github.com/AoiDragon/POPE, and "
        f"{IMAGES}/ of http://images.cocodataset.org/zips/val2014.zip"
    )

    allowed: ClassVar = {"category": ("all", *POPE_CATEGORIES)}

    category: str = "all"

    @property
    def expected_rows(self) -> int:
        """Each category has 3,000."""
        return 3000 * len(self._categories)

    def sample(self, row: FileRow, number: int) -> Sample:
        """The sample of a row; question ids are unique within a category only."""
        category, label = row.values["category"], self.answer(row).lower().strip()
        if label not in ("yes", "no"):
            raise ValueError(f"{row.place}: the answer is {label!r}; POPE's are yes and no")
        name, text = f"{category}/{row.values['question_id']}", row.text("question").strip() + SHORT_ANSWER
        return self.ask(row, name, text, {"label": label, "category": category}, kind=category)

    def own_rows(self, folder: Path) -> list[FileRow] | None:
        """The benchmark's own files, category by category."""
        if parquet_files(folder, self.answered) or any((folder / "Full").glob("*.parquet")):
            return None
        return [row for name in self._categories for row in self._own_rows(folder, name)]

    def parquet_rows(self) -> list[FileRow]:
        """The categories' rows: of one split, or of a folder ``Full`` with a split for each."""
        source = task_source(self)
        if not isinstance(source, Path) or parquet_files(source, self.answered):
            rows = super().parquet_rows()
        else:
            rows = [row for name in self._categories for row in read_split(self, name, self.columns, ["image"], "Full")]
        return [row for row in rows if row.values["category"] in self._categories]

    @property
    def _categories(self) -> tuple[str, ...]:
        return POPE_CATEGORIES if self.category == "all" else (self.category,)

    def _own_rows(self, folder: Path, category: str) -> list[FileRow]:
        name = f"coco_pope_{category}.json"
        rows = read_jsonl(find_file(self, folder, name, f"coco/{name}"), ("question_id", "image", "text", "label"))
        return [
            row.with_values(
                question=row.values["text"],
                answer=row.values["label"],
                category=category,
                image=folder / IMAGES / row.text("image"),
            )
            for row in rows
        ]
