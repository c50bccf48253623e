"""VizWiz-VQA (Gurari et al., arXiv:1802.08218): photographs and spoken questions of blind people, some unanswerable."""

from __future__ import annotations

from dataclasses import dataclass

from subtoken_train.evaluation.metrics.vqa_accuracy import SoftAccuracy
from subtoken_train.evaluation.tasks.base import Sample
from subtoken_train.evaluation.tasks.image_questions import (
    SHORT_ANSWER,
    ImageQuestions,
    about_image,
    image_of,
    people_answers,
    text_of,
)
from subtoken_train.evaluation.tasks.reading import Row

UNANSWERABLE = "\nWhen the provided information is insufficient, respond with 'Unanswerable'."


@dataclass
class VizWiz(ImageQuestions):
    """The validation set; the test set, which LLaVA's table shows, is scored by the challenge's server alone.

    Prompts are lmms-eval's: the question capitalised, the rest of it in lower case.
    """

    name = "vizwiz"
    hub_id = "lmms-lab/VizWiz-VQA"
    rows = 4319
    primary = "accuracy"
    answered = "val"
    columns = ("question_id", "question", "answers", "category")
    where = "hf download lmms-lab/VizWiz-VQA --repo-type dataset --local-dir DIR --include 'data/val-*'"

    def metric(self) -> SoftAccuracy:
        """Soft accuracy over the people's answers."""
        return SoftAccuracy()

    def sample(self, row: Row, number: int) -> Sample:
        """The sample of a row."""
        return Sample(
            str(row.values["question_id"]),
            about_image(text_of(row, "question").capitalize() + UNANSWERABLE + SHORT_ANSWER),
            people_answers(row, self.answered),
            image_of(row),
            max_new_tokens=128,
            kind=row.values["category"] or "question",
        )
