"""ChartQA (Masry et al., arXiv:2203.10244): questions about charts, written by people or made from captions."""

from __future__ import annotations

from dataclasses import dataclass

from subtoken_train.evaluation.metrics.short_answers import RelaxedAccuracy
from subtoken_train.evaluation.tasks.base import Sample
from subtoken_train.evaluation.tasks.image_questions import ImageQuestions, about_image, answer_of, image_of, text_of
from subtoken_train.evaluation.tasks.reading import Row

SINGLE_WORD = "\nAnswer the question with a single word."
KINDS = {"human_test": "human", "augmented_test": "augmented"}


@dataclass
class ChartQA(ImageQuestions):
    """The test set, whose answers are public. It has no ids: a sample's is its place in the files, from 0."""

    name = "chartqa"
    hub_id = "lmms-lab/ChartQA"
    rows = 2500
    primary = "relaxed_accuracy"
    answered = "test"
    columns = ("type", "question", "answer")
    where = "hf download lmms-lab/ChartQA --repo-type dataset --local-dir DIR"

    def metric(self) -> RelaxedAccuracy:
        """Accuracy with 5 % of tolerance, over all and by kind."""
        return RelaxedAccuracy()

    def sample(self, row: Row, number: int) -> Sample:
        """The sample of a row."""
        answer, label = answer_of(row, self.answered), row.values["type"]
        if label not in KINDS:
            raise ValueError(f"{row.place}: type {label!r}; allowed: {', '.join(KINDS)}")
        reference = {"answer": answer, "kind": KINDS[label]}
        prompt = about_image(text_of(row, "question") + SINGLE_WORD)
        return Sample(str(number), prompt, reference, image_of(row), kind=KINDS[label])
