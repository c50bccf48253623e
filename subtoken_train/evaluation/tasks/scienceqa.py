"""ScienceQA (Lu et al., arXiv:2209.09513): multiple choice from school books, 2,017 test questions with an image.

Read from lmms-eval's Parquet form, or from the benchmark's own ``problems.json`` and ``pid_splits.json`` with its
images in ``images/test/ID/image.png``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from subtoken_train.datasets.image_sources import inside
from subtoken_train.evaluation.metrics.choices import LETTERS, ScienceQAScores
from subtoken_train.evaluation.tasks.file_rows import FileRow, benchmark_json, find_file, read_named, unique_ids
from subtoken_train.evaluation.tasks.image_questions import LETTER_ANSWER, ImageQuestions, about_image, lettered
from subtoken_train.evaluation.tasks.table_files import read_split
from subtoken_train.evaluation.tasks.task import Sample

PROBLEMS, SPLITS = "problems.json", "pid_splits.json"
SUBSETS = {"img": 2017, "full": 4241}


@dataclass
class ScienceQA(ImageQuestions):
    """The test questions: with an image (``img``), or all (``full``), of which those without one are asked as text."""

    name = "scienceqa"
    hub_id = "lmms-lab/ScienceQA"
    rows = SUBSETS["img"]
    scored_by = ScienceQAScores
    answered = "test"
    columns = ("question", "choices", "answer", "hint", "subject")
    where = (
        "Parquet: hf download lmms-lab/ScienceQA --repo-type dataset --local-dir DIR. The benchmark's own form, in "
        f"DIR: {PROBLEMS} and {SPLITS} of data/scienceqa in https://github.com/lupantech/ScienceQA, and "
        "https://scienceqa.s3.us-west-1.amazonaws.com/images/test.zip unpacked in DIR/images"
    )

    allowed: ClassVar = {"subset": tuple(SUBSETS)}

    subset: str = "img"

    @property
    def expected_rows(self) -> int:
        return SUBSETS[self.subset]

    def sample(self, row: FileRow, number: int) -> Sample:
        """Return the sample of a row; without an id of its own, its number in the split is one."""
        values = row.values
        answer, choices, image = values["answer"], row.texts("choices"), values["image"]
        if type(answer) is not int or not 0 <= answer < len(choices) <= len(LETTERS):
            raise ValueError(f"{row.place}: the answer is {answer!r}, which is none of the {len(choices)} choices")
        hint = f"Context: {values['hint']}\n" if values["hint"] else ""
        text = f"{hint}{row.text('question')}\n{lettered(choices)}{LETTER_ANSWER}"
        return Sample(
            str(values.get("id", f"{self.answered}-{number}")),
            text if image is None else about_image(text),
            {"answer": answer, "choices": len(choices), "image": image is not None},
            () if image is None else (image,),
            kind=values["subject"],
        )

    def parquet_rows(self) -> list[FileRow]:
        """Return the rows of the subset's configuration."""
        return read_split(self, self.answered, self.columns, ["image"], f"ScienceQA-{self.subset.upper()}")

    def own_rows(self, folder: Path) -> list[FileRow] | None:
        """Return the benchmark's own problems, of the split and the subset."""
        if not any((folder / name).is_file() for name in (PROBLEMS, SPLITS)):
            return None
        path = find_file(self, folder, PROBLEMS)
        problems = read_named(path, (*self.columns, "image"))
        splits = benchmark_json(find_file(self, folder, SPLITS))
        ids = splits.get(self.answered) if isinstance(splits, dict) else None
        if not isinstance(ids, list) or not all(isinstance(name, str) for name in ids):
            raise ValueError(f"{folder / SPLITS} has no list {self.answered!r} of ids; is it another file?")
        if unknown := [name for name in ids if name not in problems]:
            raise ValueError(
                f"{folder / SPLITS}: {len(unknown):,} ids of {self.answered!r} are not in {path}, first "
                f"{unknown[0]!r}; the file may be cut off, or the two are not of one release"
            )
        unique_ids((name, f"{folder / SPLITS}, {self.answered}[{number}]") for number, name in enumerate(ids))
        rows = []
        for name in ids:
            image, images = problems[name].values["image"], folder / "images" / self.answered
            if image or self.subset == "full":
                found = inside(images, f"{name}/{image}") if image else None
                rows.append(problems[name].with_values(id=name, image=found))
        return rows
