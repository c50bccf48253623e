"""ScienceQA (Lu et al., arXiv:2209.09513): multiple choice from school books, 2,017 test questions with an image.

Read from lmms-eval's Parquet form, or from the benchmark's own ``problems.json`` and ``pid_splits.json`` with its
images in ``images/test/ID/image.png``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from subtoken_train.datasets.images import inside
from subtoken_train.errors import unknown_name
from subtoken_train.evaluation.metrics.choices import ScienceQAScores
from subtoken_train.evaluation.metrics.option_letters import LETTERS
from subtoken_train.evaluation.tasks.base import Sample
from subtoken_train.evaluation.tasks.image_questions import ImageQuestions, about_image, text_of
from subtoken_train.evaluation.tasks.options import LETTER_ANSWER, lettered
from subtoken_train.evaluation.tasks.reading import Row, find_file, read_split, task_source, unique_ids
from subtoken_train.evaluation.tasks.text_files import read_json, read_named

PROBLEMS, SPLITS = "problems.json", "pid_splits.json"
SUBSETS = {"img": 2017, "full": 4241}


@dataclass
class ScienceQA(ImageQuestions):
    """The test questions.

    Attributes:
        subset: ``img``: those with an image; ``full``: all, of which those without one are asked as text.
    """

    name = "scienceqa"
    hub_id = "lmms-lab/ScienceQA"
    rows = SUBSETS["img"]
    primary = "accuracy"
    answered = "test"
    columns = ("question", "choices", "answer", "hint", "subject")
    where = (
        "Parquet: hf download lmms-lab/ScienceQA --repo-type dataset --local-dir DIR. The benchmark's own form, in "
        f"DIR: {PROBLEMS} and {SPLITS} of data/scienceqa in https://github.com/lupantech/ScienceQA, and "
        "https://scienceqa.s3.us-west-1.amazonaws.com/images/test.zip unpacked in DIR/images"
    )

    subset: str = "img"

    def __post_init__(self) -> None:
        """Refuse an unknown subset.

        Raises:
            ValueError: there is no such subset.
        """
        if self.subset not in SUBSETS:
            raise unknown_name("subset of scienceqa", self.subset, SUBSETS)

    @property
    def expected_rows(self) -> int:
        """Of the subset."""
        return SUBSETS[self.subset]

    def samples(self) -> Sequence[Sample]:
        """All samples in the order of the files.

        Raises:
            ValueError: a file is missing, truncated or malformed, an id is unknown, or an answer is no choice.
        """
        source = task_source(self)
        if isinstance(source, Path) and any((source / name).is_file() for name in (PROBLEMS, SPLITS)):
            rows = self._own_rows(source)
        else:
            config = f"ScienceQA-{self.subset.upper()}"
            rows = read_split(self, self.answered, self.columns, ["image"], config)
        return [self.sample(row, number) for number, row in enumerate(rows)]

    def metric(self) -> ScienceQAScores:
        """Accuracy in two readings."""
        return ScienceQAScores()

    def sample(self, row: Row, number: int) -> Sample:
        """The sample of a row; without an id of its own, its number in the split is one."""
        values = row.values
        answer, choices, image = values["answer"], values["choices"], values["image"]
        if not isinstance(answer, int) or not 0 <= answer < len(choices) <= len(LETTERS):
            raise ValueError(f"{row.place}: the answer is {answer!r}, which is none of the {len(choices)} choices")
        hint = f"Context: {values['hint']}\n" if values["hint"] else ""
        text = f"{hint}{text_of(row, 'question')}\n{lettered(choices)}{LETTER_ANSWER}"
        return Sample(
            str(values.get("id", f"{self.answered}-{number}")),
            text if image is None else about_image(text),
            {"answer": answer, "choices": len(choices), "image": image is not None},
            () if image is None else (image,),
            kind=values["subject"],
        )

    def _own_rows(self, folder: Path) -> list[Row]:
        path = find_file(self, folder, PROBLEMS)
        problems = read_named(path, (*self.columns, "image"))
        splits = read_json(find_file(self, folder, SPLITS))
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
            values, place = problems[name]
            picture = (
                inside(folder / "images" / self.answered, f"{name}/{values['image']}") if values["image"] else None
            )
            if picture or self.subset == "full":
                rows.append(Row({**values, "id": name, "image": picture}, place))
        return rows
