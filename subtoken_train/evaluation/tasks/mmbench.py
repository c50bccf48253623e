"""MMBench, development set (Liu et al., arXiv:2307.06281), English and Chinese: multiple choice in all rotations.

Read from lmms-eval's Parquet form (4,329 rows, what the paper scores), or from the benchmark's own TSV with base64
images: the English release of July 2023 has 4,377 rows. The rotations of a question are rows of their own in all of
them, with the same index modulo one million, so vanilla and circular accuracy come from the same answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from subtoken_train.datasets.image_sources import EncodedImage
from subtoken_train.evaluation.metrics.choices import MMBenchScores
from subtoken_train.evaluation.tasks.file_rows import FileRow, task_source
from subtoken_train.evaluation.tasks.image_questions import LETTER_ANSWER, ImageQuestions, lettered
from subtoken_train.evaluation.tasks.table_files import read_table
from subtoken_train.evaluation.tasks.task import Sample

PROMPTS = {
    "llava": ("{}\n", "{question}\n{options}{ending}"),
    "lmms": ("{} ", "{question} There are several options:\n{options}\n{ending}"),
    "vlmevalkit": (
        "Hint: {}\n",
        "Question: {question}\nOptions:\n{options}\nPlease select the correct answer from the options above. \n",
    ),
}
"""Words of LLaVA-1.5, lmms-eval and VLMEvalKit, whose own are English for Chinese questions too: for a hint, and for
the question. Odd spaces and lines are theirs."""


@dataclass
class MMBench(ImageQuestions):
    """All English rows of the development set, in the words of ``prompt``: ``llava``, ``lmms`` or ``vlmevalkit``."""

    name = "mmbench"
    hub_id = "lmms-lab/MMBench"
    rows = 4329
    scored_by = MMBenchScores
    answered = "dev"
    config = "en"
    columns = ("index", "question", "hint", "answer", "A", "B", "C", "D", "category")
    where = (
        "Parquet: hf download lmms-lab/MMBench --repo-type dataset --local-dir DIR --include 'en/dev-*'. TSV, in DIR: "
        "https://opencompass.openxlab.space/utils/benchmarks/MMBench/MMBench_DEV_EN.tsv, or LLaVA's "
        "https://download.openmmlab.com/mmclassification/datasets/mmbench/mmbench_dev_20230712.tsv"
    )

    allowed: ClassVar = {"prompt": tuple(PROMPTS)}
    tables: ClassVar[Mapping[str, int]] = {"mmbench_dev_20230712.tsv": 4377, "MMBench_DEV_EN.tsv": 4329}
    """Rows by name; the first that is in the source folder is read."""
    endings: ClassVar[Mapping[str, str]] = {"llava": LETTER_ANSWER, "lmms": LETTER_ANSWER}
    """Words that ask for the letter, by ``prompt``."""

    prompt: str = "llava"

    @property
    def expected_rows(self) -> int:
        source = task_source(self)
        table = self._table(source) if isinstance(source, Path) else None
        return self.rows if table is None else self.tables[table.name]

    def sample(self, row: FileRow, number: int) -> Sample:
        """Return the sample of a row."""
        index, answer = _index(row), _present(row.values["answer"])
        if answer is None:
            raise self.without_answer(row)
        found = {letter: option for letter in "ABCD" if (option := _present(row.values[letter]))}
        if answer not in found:
            raise ValueError(f"{row.place}: the answer is {answer!r}, and the options are {', '.join(found)}")
        before, words = PROMPTS[self.prompt]
        hint = self.hint(row)
        ending = self.endings.get(self.prompt, "")
        asked = words.format(question=row.text("question"), options=lettered(found), ending=ending)
        reference = {"index": index, "answer": answer, "options": found}
        if nan := "".join(letter for letter in "ABCD" if letter not in found and row.values[letter] is not None):
            reference["nan_options"] = nan
        if hint:
            asked = before.format(hint) + asked
        return self.ask(row, index, asked, reference, max_new_tokens=128, kind=row.values["category"])

    def own_rows(self, folder: Path) -> list[FileRow] | None:
        """Return the rows of the benchmark's own table."""
        table = self._table(folder)
        return None if table is None else _with_images(read_table(table, self.columns, "\t", image="image"))

    def hint(self, row: FileRow) -> str | None:
        """Return what stands before the question; None where a row has none."""
        return _present(row.values["hint"])

    def _table(self, folder: Path) -> Path | None:
        return next((folder / name for name in self.tables if (folder / name).is_file()), None)


@dataclass
class MMBenchCN(MMBench):
    """The same questions in Chinese.

    As lmms-eval asks (``prompt: lmms``), the text "nan" in the place of a hint is one. Its score is a judge's
    (``gpt_eval_score``), so none here is its own; ``lmms_static_circular`` is that of its English task without one.
    """

    name = "mmbench_cn"
    config = "cn"
    where = (
        "Parquet: hf download lmms-lab/MMBench --repo-type dataset --local-dir DIR --include 'cn/dev-*'. TSV, in DIR: "
        "https://opencompass.openxlab.space/utils/benchmarks/MMBench/MMBench_DEV_CN.tsv"
    )
    tables: ClassVar = {"MMBench_DEV_CN.tsv": 4329}
    endings: ClassVar = {
        "llava": "\n请直接回答选项字母。",
        "lmms": "\n请直接使用所提供的选项字母作为答案回答。",
    }

    def hint(self, row: FileRow) -> str | None:
        """Return what stands before the question; a table's empty cells are "nan" in the Hub's file."""
        given: str | None = row.values["hint"]
        return super().hint(row) if self.prompt != "lmms" else "nan" if given == "" else given


def _with_images(rows: Sequence[FileRow]) -> list[FileRow]:
    """Give rows whose image cell is the index of another row, to save space, that row's image."""
    images = {row.values["index"]: row.values["image"] for row in rows if isinstance(row.values["image"], EncodedImage)}
    found = []
    for row in rows:
        image = row.values["image"]
        if not isinstance(image, EncodedImage) and image not in images:
            raise ValueError(f"{row.place}: image is {image!r}, neither base64 nor the index of a row with an image")
        found.append(row.with_values(image=images.get(image, image)))
    return found


def _present(value: Any) -> str | None:
    """Return the text of a cell; None where it is empty: the table's empty cells are "nan" in the Hub's file."""
    return None if value is None or str(value).lower() in ("", "nan") else str(value)


def _index(row: FileRow) -> int:
    try:
        return int(row.values["index"])
    except ValueError:
        raise ValueError(f"{row.place}: index {row.values['index']!r} is not a number") from None
