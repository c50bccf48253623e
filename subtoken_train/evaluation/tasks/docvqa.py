"""DocVQA (Mathew et al., arXiv:2007.00398) and InfographicVQA (arXiv:2104.12756): questions about pages of text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from subtoken_train.evaluation.metrics.short_answers import ANLS
from subtoken_train.evaluation.tasks.base import Sample
from subtoken_train.evaluation.tasks.image_questions import (
    SHORT_ANSWER,
    ImageQuestions,
    about_image,
    first_of,
    image_of,
    people_answers,
    text_of,
)
from subtoken_train.evaluation.tasks.reading import Row


@dataclass
class PageQuestions(ImageQuestions):
    """A validation set of ``lmms-lab/DocVQA``; the test sets are scored by the challenge's server alone."""

    hub_id = "lmms-lab/DocVQA"
    primary = "lmms_anls"
    answered = "validation"
    kinds: ClassVar[str]
    """Column of the question's labels; its kind is the first of them."""

    def metric(self) -> ANLS:
        """Similarity to the closest reference, in two readings."""
        return ANLS()

    def sample(self, row: Row, number: int) -> Sample:
        """The sample of a row."""
        return Sample(
            str(row.values["questionId"]),
            about_image(text_of(row, "question") + SHORT_ANSWER),
            people_answers(row, self.answered),
            image_of(row),
            max_new_tokens=32,
            kind=first_of(row.values[self.kinds]),
        )


@dataclass
class DocVQA(PageQuestions):
    """Scanned pages of industry documents."""

    name = "docvqa"
    rows = 5349
    config = "DocVQA"
    kinds = "question_types"
    columns = ("questionId", "question", "answers", "question_types")
    where = "hf download lmms-lab/DocVQA --repo-type dataset --local-dir DIR --include 'DocVQA/validation-*'"


@dataclass
class InfographicVQA(PageQuestions):
    """Infographics; the words that a text detector found in them are not given to the model."""

    name = "infographicvqa"
    rows = 2801
    config = "InfographicVQA"
    kinds = "answer_type"
    columns = ("questionId", "question", "answers", "answer_type")
    where = "hf download lmms-lab/DocVQA --repo-type dataset --local-dir DIR --include 'InfographicVQA/validation-*'"
