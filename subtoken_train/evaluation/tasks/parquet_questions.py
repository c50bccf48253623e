"""Image questions that are read in the Hub's Parquet form alone: charts, pages of text, photographs of blind people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from subtoken_train.evaluation.metrics.short_answers import ANLS, RelaxedAccuracy
from subtoken_train.evaluation.metrics.vqa_accuracy import SoftAccuracy
from subtoken_train.evaluation.tasks.file_rows import FileRow
from subtoken_train.evaluation.tasks.image_questions import SHORT_ANSWER, ImageQuestions
from subtoken_train.evaluation.tasks.task import Sample

SINGLE_WORD = "\nAnswer the question with a single word."
CHART_KINDS = {"human_test": "human", "augmented_test": "augmented"}
UNANSWERABLE = "\nWhen the provided information is insufficient, respond with 'Unanswerable'."


@dataclass
class ChartQA(ImageQuestions):
    """ChartQA (Masry et al., arXiv:2203.10244): questions about charts, written by people or made from captions.

    The test set, whose answers are public. It has no ids: a sample's is its place in the files, from 0.
    """

    name = "chartqa"
    hub_id = "lmms-lab/ChartQA"
    rows = 2500
    primary = "relaxed_accuracy"
    scored_by = RelaxedAccuracy
    answered = "test"
    columns = ("type", "question", "answer")
    where = "hf download lmms-lab/ChartQA --repo-type dataset --local-dir DIR"

    def sample(self, row: FileRow, number: int) -> Sample:
        """The sample of a row."""
        answer, label = self.answer(row), row.values["type"]
        if label not in CHART_KINDS:
            raise ValueError(f"{row.place}: type {label!r}; allowed: {', '.join(CHART_KINDS)}")
        kind = CHART_KINDS[label]
        return self.ask(row, number, row.text("question") + SINGLE_WORD, {"answer": answer, "kind": kind}, kind=kind)


@dataclass
class PageQuestions(ImageQuestions):
    """A validation set of ``lmms-lab/DocVQA``; the test sets are scored by the challenge's server alone."""

    hub_id = "lmms-lab/DocVQA"
    primary = "lmms_anls"
    scored_by = ANLS
    answered = "validation"
    kinds: ClassVar[str]
    """Column of the question's labels; its kind is the first of them."""

    def sample(self, row: FileRow, number: int) -> Sample:
        """The sample of a row."""
        kinds, text = row.values[self.kinds], row.text("question") + SHORT_ANSWER
        kind = str(kinds[0]) if kinds else "question"
        return self.ask(row, row.values["questionId"], text, self.people(row), max_new_tokens=32, kind=kind)


@dataclass
class DocVQA(PageQuestions):
    """DocVQA (Mathew et al., arXiv:2007.00398): scanned pages of industry documents."""

    name = "docvqa"
    rows = 5349
    config = "DocVQA"
    kinds = "question_types"
    columns = ("questionId", "question", "answers", "question_types")
    where = "hf download lmms-lab/DocVQA --repo-type dataset --local-dir DIR --include 'DocVQA/validation-*'"


@dataclass
class InfographicVQA(PageQuestions):
    """InfographicVQA (arXiv:2104.12756); the words that a text detector found are not given to the model."""

    name = "infographicvqa"
    rows = 2801
    config = "InfographicVQA"
    kinds = "answer_type"
    columns = ("questionId", "question", "answers", "answer_type")
    where = "hf download lmms-lab/DocVQA --repo-type dataset --local-dir DIR --include 'InfographicVQA/validation-*'"


@dataclass
class VizWiz(ImageQuestions):
    """VizWiz-VQA (Gurari et al., arXiv:1802.08218): photographs and spoken questions of blind people.

    The validation set; the test set, which LLaVA's table shows, is scored by the challenge's server alone. Some
    questions are unanswerable. Prompts are lmms-eval's: the question capitalised, the rest of it in lower case.
    """

    name = "vizwiz"
    hub_id = "lmms-lab/VizWiz-VQA"
    rows = 4319
    primary = "accuracy"
    scored_by = SoftAccuracy
    answered = "val"
    columns = ("question_id", "question", "answers", "category")
    where = "hf download lmms-lab/VizWiz-VQA --repo-type dataset --local-dir DIR --include 'data/val-*'"

    def sample(self, row: FileRow, number: int) -> Sample:
        """The sample of a row."""
        text = row.text("question").capitalize() + UNANSWERABLE + SHORT_ANSWER
        kind = row.values["category"] or "question"
        return self.ask(row, row.values["question_id"], text, self.people(row), max_new_tokens=128, kind=kind)
