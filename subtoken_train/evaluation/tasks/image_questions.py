"""What tasks of one image and one question per row have in common: reading rows, and words around a question."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from subtoken_train.datasets.images import ImageSource
from subtoken_train.evaluation.tasks.task import Sample, Task
from subtoken_train.evaluation.tasks.parquet_sets import Row, read_split, task_source, unique_ids

SHORT_ANSWER = "\nAnswer the question using a single word or phrase."
"""LLaVA-1.5's words for short answers; lmms-eval's default too."""


@dataclass
class ImageQuestions(Task):
    """A benchmark in Parquet files, one question and its image a row; a subclass turns a row into a sample."""

    modality = "image"
    answered: ClassVar[str]
    """The split whose answers are public."""
    columns: ClassVar[tuple[str, ...]]
    """What a sample is made of, beside the column ``image``."""
    config: ClassVar[str | None] = None
    """The set's configuration; None: its default one."""
    own_files: ClassVar[tuple[str, ...]] = ()
    """Files of another form than Parquet; a folder with any of them is read by ``own_samples``."""

    @abstractmethod
    def sample(self, row: Row, number: int) -> Sample:
        """The sample of one row.

        Args:
            row: with ``columns`` and ``image``.
            number: of the row in the whole split, from 0.

        Raises:
            ValueError: a value is none that the benchmark has; the message names file and row.
        """

    def samples(self) -> Sequence[Sample]:
        """All samples in the order of the files; images are not opened.

        Raises:
            ValueError: files are missing, truncated or of another kind, an id is there twice, or answers are missing.
        """
        source = task_source(self)
        if isinstance(source, Path) and any((source / name).is_file() for name in self.own_files):
            return self.own_samples(source)
        rows = read_split(self, self.answered, self.columns, ["image"], self.config)
        samples = [self.sample(row, number) for number, row in enumerate(rows)]
        unique_ids((sample.id, row.place) for sample, row in zip(samples, rows, strict=True))
        return samples

    def own_samples(self, folder: Path) -> list[Sample]:
        """All samples of a folder with ``own_files``, in the order of the questions' file; images are not opened.

        Raises:
            ValueError: a file is missing, truncated or malformed, an id is there twice, or the files are of different
                splits.
        """
        raise AssertionError("a task with own_files reads them")


def about_image(text: str) -> str:
    """The user's turn: an image, then ``text``."""
    return f"<image>\n{text}"


def image_of(row: Row) -> tuple[ImageSource]:
    """The row's image.

    Raises:
        ValueError: it has none.
    """
    image = row.values["image"]
    if image is None:
        raise ValueError(f"{row.place}: the row has no image; fetch the file again")
    return (image,)


def text_of(row: Row, column: str) -> str:
    """A row's text.

    Raises:
        ValueError: the cell holds none.
    """
    value = row.values[column]
    if not isinstance(value, str):
        raise ValueError(f"{row.place}: {column} is {value!r}, and a text is wanted; fetch the file again")
    return value


def texts_of(row: Row, column: str) -> list[str]:
    """A row's list of texts, which may be those that mappings have as ``answer``.

    Raises:
        ValueError: the cell holds no such list.
    """
    found = row.values[column]
    if isinstance(found, list):
        given = [one.get("answer") if isinstance(one, Mapping) else one for one in found]
        texts = [text for text in given if isinstance(text, str)]
        if len(texts) == len(given):
            return texts
    raise ValueError(f"{row.place}: {column} is {found!r}, and a list of texts is wanted; fetch the file again")


def answer_of(row: Row, answered: str) -> str:
    """The row's one answer.

    Args:
        row: with a column ``answer``.
        answered: the split that has some, for the message.

    Raises:
        ValueError: there is none.
    """
    if row.values["answer"] is None:
        raise without_answer(row, answered)
    return text_of(row, "answer")


def people_answers(row: Row, answered: str) -> dict[str, list[str]]:
    """What metrics over several accepted answers read: ``answers``, a list of texts.

    Args:
        row: with a column ``answers`` of texts, or of mappings with ``answer``.
        answered: the split that has some, for the message.

    Raises:
        ValueError: there are none.
    """
    if not row.values.get("answers"):
        raise without_answer(row, answered)
    return {"answers": texts_of(row, "answers")}


def without_answer(row: Row, answered: str) -> ValueError:
    """The error for a row that cannot be scored.

    Args:
        row: without answers.
        answered: the split that has some.
    """
    return ValueError(f"{row.place}: no answers, so this is another split's file; use that of {answered!r}")


def first_of(values: Any, default: str = "question") -> str:
    """The first of a row's labels; ``default`` where it has none."""
    return str(values[0]) if values else default
