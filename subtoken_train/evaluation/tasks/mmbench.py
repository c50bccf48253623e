"""MMBench, English development set (Liu et al., arXiv:2307.06281): multiple choice, every question in all rotations.

Read from lmms-eval's Parquet form (4,329 rows, what the paper scores), or from the benchmark's own TSV with base64
images: the release of July 2023 has 4,377 rows. The rotations of a question are rows of their own in all of them, with
the same index modulo one million, so vanilla and circular accuracy come from the same answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from subtoken_train.datasets.images import EncodedImage
from subtoken_train.errors import unknown_name
from subtoken_train.evaluation.metrics.choices import MMBenchScores
from subtoken_train.evaluation.tasks.base import Sample
from subtoken_train.evaluation.tasks.image_questions import (
    ImageQuestions,
    about_image,
    image_of,
    text_of,
    without_answer,
)
from subtoken_train.evaluation.tasks.options import LETTER_ANSWER, lettered
from subtoken_train.evaluation.tasks.reading import Row, read_split, task_source, unique_ids
from subtoken_train.evaluation.tasks.text_files import read_table

TABLES = {"mmbench_dev_20230712.tsv": 4377, "MMBench_DEV_EN.tsv": 4329}
"""Rows by name; the first that is in the source folder is read."""


def llava_prompt(question: str, hint: str | None, options: Mapping[str, str]) -> str:
    """LLaVA-1.5's question."""
    before = f"{hint}\n" if hint else ""
    return f"{before}{question}\n{lettered(options)}{LETTER_ANSWER}"


def lmms_prompt(question: str, hint: str | None, options: Mapping[str, str]) -> str:
    """lmms-eval's question; the empty line before the last is its own."""
    before = f"{hint} " if hint else ""
    return f"{before}{question} There are several options:\n{lettered(options)}\n{LETTER_ANSWER}"


def vlmevalkit_prompt(question: str, hint: str | None, options: Mapping[str, str]) -> str:
    """VLMEvalKit's question, which asks for no letter; the space and line break at its end are its own."""
    before = f"Hint: {hint}\n" if hint else ""
    return (
        f"{before}Question: {question}\nOptions:\n{lettered(options)}\n"
        "Please select the correct answer from the options above. \n"
    )


PROMPTS: dict[str, Callable[[str, str | None, Mapping[str, str]], str]] = {
    "llava": llava_prompt,
    "lmms": lmms_prompt,
    "vlmevalkit": vlmevalkit_prompt,
}


@dataclass
class MMBench(ImageQuestions):
    """All rows of the development set.

    Attributes:
        prompt: whose words are used: ``llava``, ``lmms`` or ``vlmevalkit``.
    """

    name = "mmbench"
    hub_id = "lmms-lab/MMBench"
    rows = 4329
    primary = "accuracy"
    answered = "dev"
    config = "en"
    columns = ("index", "question", "hint", "answer", "A", "B", "C", "D", "category")
    where = (
        "Parquet: hf download lmms-lab/MMBench --repo-type dataset --local-dir DIR --include 'en/dev-*'. TSV, in DIR: "
        "https://opencompass.openxlab.space/utils/benchmarks/MMBench/MMBench_DEV_EN.tsv, or LLaVA's "
        "https://download.openmmlab.com/mmclassification/datasets/mmbench/mmbench_dev_20230712.tsv"
    )

    prompt: str = "llava"

    def __post_init__(self) -> None:
        """Refuse unknown words.

        Raises:
            ValueError: there are no such words.
        """
        if self.prompt not in PROMPTS:
            raise unknown_name("prompt of mmbench", self.prompt, PROMPTS)

    @property
    def expected_rows(self) -> int:
        """Of the Parquet form, or of the TSV that is in the source folder."""
        table = self._table()
        return self.rows if table is None else TABLES[table.name]

    def samples(self) -> Sequence[Sample]:
        """All samples in the order of the files.

        Raises:
            ValueError: a file is missing, truncated or malformed, an index is there twice, or the split has no answers.
        """
        table = self._table()
        if table is None:
            rows = read_split(self, self.answered, self.columns, ["image"], self.config)
        else:
            rows = _with_images(read_table(table, self.columns, "\t", image="image"))
        samples = [self.sample(row, number) for number, row in enumerate(rows)]
        unique_ids((sample.id, row.place) for sample, row in zip(samples, rows, strict=True))
        return samples

    def metric(self) -> MMBenchScores:
        """Vanilla and circular accuracy."""
        return MMBenchScores()

    def sample(self, row: Row, number: int) -> Sample:
        """The sample of a row."""
        index, answer = _index(row), _present(row.values["answer"])
        if answer is None:
            raise without_answer(row, self.answered)
        found = {letter: option for letter in "ABCD" if (option := _present(row.values[letter]))}
        if answer not in found:
            raise ValueError(f"{row.place}: the answer is {answer!r}, and the options are {', '.join(found)}")
        asked = PROMPTS[self.prompt](text_of(row, "question"), _present(row.values["hint"]), found)
        return Sample(
            str(index),
            about_image(asked),
            {"index": index, "answer": answer, "options": found},
            image_of(row),
            max_new_tokens=128,
            kind=row.values["category"],
        )

    def _table(self) -> Path | None:
        source = task_source(self)
        if not isinstance(source, Path):
            return None
        return next((source / name for name in TABLES if (source / name).is_file()), None)


def _with_images(rows: Sequence[Row]) -> list[Row]:
    """Rows whose image cell is the index of another row, to save space, get that row's image."""
    images = {row.values["index"]: row.values["image"] for row in rows if isinstance(row.values["image"], EncodedImage)}
    found = []
    for row in rows:
        image = row.values["image"]
        if not isinstance(image, EncodedImage) and image not in images:
            raise ValueError(f"{row.place}: image is {image!r}, neither base64 nor the index of a row with an image")
        found.append(Row({**row.values, "image": images.get(image, image)}, row.place))
    return found


def _present(value: Any) -> str | None:
    """The text of a cell; None where it is empty: missing cells were stored as "nan"."""
    return None if value is None or str(value).lower() in ("", "nan") else str(value)


def _index(row: Row) -> int:
    try:
        return int(row.values["index"])
    except ValueError:
        raise ValueError(f"{row.place}: index {row.values['index']!r} is no number") from None
