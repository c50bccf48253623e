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

from subtoken_train.errors import unknown_name
from subtoken_train.evaluation.metrics.mmbench import MMBenchScores
from subtoken_train.evaluation.tasks.base import Sample
from subtoken_train.evaluation.tasks.image_questions import ImageQuestions, about_image, image_of
from subtoken_train.evaluation.tasks.options import LETTER_ANSWER, lettered
from subtoken_train.evaluation.tasks.reading import Row, no_answers, read_split, task_source, unique_ids
from subtoken_train.evaluation.tasks.text_files import read_table

TABLES = {
    "dev": {"mmbench_dev_20230712.tsv": 4377, "mmbench_dev_en_20231003.tsv": 4329, "MMBench_DEV_EN.tsv": 4329},
    "test": {"mmbench_test_20230712.tsv": 6718, "mmbench_test_en_20231003.tsv": 6666, "MMBench_TEST_EN.tsv": 6666},
}


def llava_prompt(question: str, hint: str | None, options: Mapping[str, str]) -> str:
    """LLaVA-1.5's question."""
    return f"{hint}\n" * bool(hint) + f"{question}\n{lettered(options)}{LETTER_ANSWER}"


def lmms_prompt(question: str, hint: str | None, options: Mapping[str, str]) -> str:
    """lmms-eval's question; the empty line before the last is its own."""
    return f"{hint} " * bool(hint) + f"{question} There are several options:\n{lettered(options)}\n{LETTER_ANSWER}"


def vlmevalkit_prompt(question: str, hint: str | None, options: Mapping[str, str]) -> str:
    """VLMEvalKit's question, which asks for no letter; the space and line break at its end are its own."""
    return (
        f"Hint: {hint}\n" * bool(hint) + f"Question: {question}\nOptions:\n{lettered(options)}\n"
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
        split: ``dev``; ``test`` has no public answers.
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
        "https://opencompass.openxlab.space/utils/VLMEval/MMBench_DEV_EN.tsv, or LLaVA's "
        "https://download.openmmlab.com/mmclassification/datasets/mmbench/mmbench_dev_20230712.tsv"
    )

    prompt: str = "llava"
    split: str = "dev"

    def __post_init__(self) -> None:
        """Refuse unknown words.

        Raises:
            ValueError: there is no such prompt or split.
        """
        if self.prompt not in PROMPTS:
            raise unknown_name("prompt of mmbench", self.prompt, PROMPTS)
        if self.split not in TABLES:
            raise unknown_name("split of mmbench", self.split, TABLES)

    @property
    def expected_rows(self) -> int:
        """Of the Parquet form, or of the TSV that is in the source folder."""
        table = self._table()
        return self.rows if table is None else TABLES[self.split][table.name]

    def samples(self) -> Sequence[Sample]:
        """All samples in the order of the files.

        Raises:
            ValueError: a file is missing, truncated or malformed, an index is there twice, or the split has no answers.
        """
        table = self._table()
        if table is None:
            rows = read_split(self, self.split, self.columns, ["image"], self.config)
        else:
            rows = read_table(table, self.columns, "\t", image="image")
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
            raise no_answers(row.place, self.split, self.answered)
        found = {letter: option for letter in "ABCD" if (option := _present(row.values[letter]))}
        if answer not in found:
            raise ValueError(f"{row.place}: the answer is {answer!r}, and the options are {', '.join(found)}")
        asked = PROMPTS[self.prompt](row.values["question"], _present(row.values["hint"]), found)
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
        return next((source / name for name in TABLES[self.split] if (source / name).is_file()), None)


def _present(value: Any) -> str | None:
    """The text of a cell; None where it is empty: missing cells were stored as "nan"."""
    return None if value is None or str(value).lower() in ("", "nan", "none") else str(value)


def _index(row: Row) -> int:
    try:
        return int(row.values["index"])
    except ValueError:
        raise ValueError(f"{row.place}: index {row.values['index']!r} is no number") from None
