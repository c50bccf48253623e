"""What tasks of one image and one question per row have in common: reading rows, and words around a question."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Any, ClassVar

from subtoken_train.evaluation.tasks.file_rows import FileRow, task_source, unique_ids
from subtoken_train.evaluation.tasks.parquet_sets import read_split
from subtoken_train.evaluation.tasks.task import Sample, Task

SHORT_ANSWER = "\nAnswer the question using a single word or phrase."
"""LLaVA-1.5's words for short answers; lmms-eval's default too."""
LETTER_ANSWER = "\nAnswer with the option's letter from the given choices directly."
"""LLaVA-1.5's words for letters; lmms-eval's default too."""


@dataclass
class ImageQuestions(Task):
    """A benchmark of one question and its image a row; a subclass turns a row into a sample."""

    modality = "image"
    answered: ClassVar[str]
    """The split whose answers are public."""
    columns: ClassVar[tuple[str, ...]]
    """What a sample is made of, beside the column ``image``."""
    config: ClassVar[str | None] = None
    """The set's configuration; None: its default one."""

    @abstractmethod
    def sample(self, row: FileRow, number: int) -> Sample:
        """The sample of one row.

        Args:
            row: with ``columns`` and ``image``.
            number: of the row in the whole split, from 0.

        Raises:
            ValueError: a value is none that the benchmark has; the message names file and row.
        """

    def samples(self) -> Sequence[Sample]:
        """All samples, of the files of the benchmark's own form or of the Parquet set; see ``Task``."""
        source = task_source(self)
        rows = self.own_rows(source) if isinstance(source, Path) else None
        if rows is None:
            rows = self.parquet_rows()
        samples = [self.sample(row, number) for number, row in enumerate(rows)]
        self.check(samples, rows)
        return samples

    def check(self, samples: Sequence[Sample], rows: Sequence[FileRow]) -> None:
        """Refuse rows that cannot stand side by side, as of one id, by a ``ValueError`` with their places."""
        unique_ids((sample.id, row.place) for sample, row in zip(samples, rows, strict=True))

    def own_rows(self, folder: Path) -> list[FileRow] | None:
        """The rows of a folder with files of the benchmark's own form; None where it has none of those."""
        return None

    def parquet_rows(self) -> list[FileRow]:
        """The rows of the Parquet set."""
        return read_split(self, self.answered, self.columns, ["image"], self.config)

    def ask(self, row: FileRow, name: object, text: str, reference: Mapping[str, Any], **others: Any) -> Sample:
        """A sample: the row's image, then ``text``; ``name`` is its id, and ``others`` are more of its fields."""
        return Sample(str(name), about_image(text), reference, row.image(), **others)

    def answer(self, row: FileRow) -> str:
        """A row's one answer, of its column ``answer``.

        Raises:
            ValueError: there is none.
        """
        if row.values["answer"] is None:
            raise self.without_answer(row)
        return row.text("answer")

    def people(self, row: FileRow) -> dict[str, list[str]]:
        """What metrics over several accepted answers read: ``answers``, a list of texts, of the row's column.

        Raises:
            ValueError: there are none.
        """
        if not row.values.get("answers"):
            raise self.without_answer(row)
        return {"answers": row.texts("answers")}

    def without_answer(self, row: FileRow) -> ValueError:
        """The error for a row that cannot be scored."""
        return ValueError(f"{row.place}: no answers, so this is another split's file; use that of {self.answered!r}")


def about_image(text: str) -> str:
    """The user's turn: an image, then ``text``."""
    return f"<image>\n{text}"


def lettered(options: Mapping[str, str] | Iterable[str]) -> str:
    """``A. first``, ``B. second``, ... in lines."""
    pairs = options.items() if isinstance(options, Mapping) else zip(ascii_uppercase, options, strict=False)
    return "\n".join(f"{letter}. {option}" for letter, option in pairs)
