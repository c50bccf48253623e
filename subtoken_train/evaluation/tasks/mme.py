"""MME (Fu et al., arXiv:2306.13394): 14 subtasks of yes/no questions, two to an image.

Read from lmms-eval's Parquet form, or from the benchmark's own folders: ``SUBTASK/NAME.txt`` (question, tab, answer)
and the image beside it, or in ``questions_answers_YN/`` and ``images/``. Answers are read as MME's own program
(``eval_tool/calculation.py``) and lmms-eval (``tasks/mme/utils.py``) read them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from subtoken_train.evaluation.metrics.metric import TaskMetric, mean
from subtoken_train.evaluation.tasks.file_rows import FileRow, read_lines
from subtoken_train.evaluation.tasks.image_questions import SHORT_ANSWER, ImageQuestions
from subtoken_train.evaluation.tasks.task import Sample

MME_PERCEPTION = (
    "existence", "count", "position", "color", "posters", "celebrity", "scene", "landmark", "artwork", "OCR",
)  # fmt: skip
MME_COGNITION = ("commonsense_reasoning", "numerical_calculation", "text_translation", "code_reasoning")
MME_SUBTASKS = MME_PERCEPTION + MME_COGNITION
_READINGS = ("official", "lmms")


class MMEScores(TaskMetric):
    """Accuracy, and the benchmark's points.

    A reference holds ``answer`` (yes, no), ``category`` (a subtask) and ``pair``, the image's name; the two questions
    of a pair are found by category and name, not by order.

    Scores:
        ``accuracy``: right answers over all questions, as lmms-eval reads them. That the sub-token paper prints this is
            a reading: its figures are whole numbers of 2,374 questions, and it names no score.
        ``official_accuracy``: the same, as MME's own program reads them.
        ``official_perception``, ``official_cognition``, ``lmms_perception``, ``lmms_cognition``: points, the sum over
            subtasks of 100 (accuracy + share of pairs with both answers right): up to 2000 and 800.
        ``official_SUBTASK``: points of one subtask, up to 200.

    A question without its partner, as a limited run leaves, counts for the accuracies but not for points.
    """

    points = frozenset(
        [f"{reading}_{total}" for reading in _READINGS for total in ("perception", "cognition")]
        + [f"official_{name}" for name in MME_SUBTASKS]
    )

    def compute(self) -> dict[str, float]:
        """Return scores by name; points of subtasks without a whole pair are left out."""
        pairs: dict[str, dict[str, list[tuple[bool, bool]]]] = {name: defaultdict(list) for name in MME_SUBTASKS}
        for text, reference in self.rows:
            right = tuple(read(text) == reference["answer"] for read in (official_answer, begun_answer))
            pairs[reference["category"]][reference["pair"]].append(right)
        official, lmms = zip(*(right for own in pairs.values() for two in own.values() for right in two), strict=True)
        scores = {"accuracy": mean(lmms), "official_accuracy": mean(official)}
        found = {name: points for name, own in pairs.items() if (points := _points([*own.values()])) is not None}
        for total, names in (("perception", MME_PERCEPTION), ("cognition", MME_COGNITION)):
            if own := [found[name] for name in names if name in found]:
                scores |= {
                    f"{reading}_{total}": sum(column)
                    for reading, column in zip(_READINGS, zip(*own, strict=True), strict=True)
                }
        return scores | {f"official_{name}": points[0] for name, points in found.items()}

    @staticmethod
    def score(prediction: Any, reference: Mapping[str, Any]) -> float:
        """Return the sample's term of ``accuracy``."""
        return float(begun_answer(prediction) == reference["answer"])


def official_answer(text: str) -> str:
    """Return ``yes`` or ``no``, whichever is in the first four characters in lower case (yes first); else ``other``."""
    return _within_four(text.lower())


def begun_answer(text: str) -> str:
    """Read an answer as ``official_answer`` does, without outer space and full stops; "y" and "n" alone count, too."""
    text = text.lower().strip().replace(".", "")
    return {"y": "yes", "n": "no"}.get(text) or _within_four(text)


def _within_four(text: str) -> str:
    return next((answer for answer in ("yes", "no") if answer in text[:4]), "other")


def _points(pairs: Sequence[Sequence[tuple[bool, bool]]]) -> tuple[float, ...] | None:
    """Return the points of one subtask in both readings; None where it has no whole pair."""
    whole = [pair for pair in pairs if len(pair) == 2]
    if not whole:
        return None
    readings = zip(*(zip(*pair, strict=True) for pair in whole), strict=True)  # a reading -> its marks, two a pair
    return tuple(100 * (mean([*map(mean, marks)]) + mean([*map(all, marks)])) for marks in readings)


YES_OR_NO = " Please answer yes or no."
"""Ending of every question; LLaVA and lmms-eval put their words for short answers in its place. Where two spaces
are before it, as in seven questions, lmms-eval leaves one, and LLaVA, which is followed here, none."""


@dataclass
class MME(ImageQuestions):
    """All subtasks. Accuracy over the questions, the first score, is a reading of the sub-token paper's column."""

    name = "mme"
    hub_id = "lmms-lab/MME"
    rows = 2374
    scored_by = MMEScores
    answered = "test"
    columns = ("question_id", "question", "answer", "category")
    where = (
        "Parquet: hf download lmms-lab/MME --repo-type dataset --local-dir DIR. The benchmark's own folders, "
        "MME_Benchmark_release_version, are given on request: "
        "https://github.com/BradyFU/Awesome-Multimodal-Large-Language-Models/tree/Evaluation"
    )

    def sample(self, row: FileRow, number: int) -> Sample:
        """Return the sample of a row; its id is image and question, because the question ids are the images'."""
        category, pair, question = str(row.values["category"]), str(row.values["question_id"]), row.text("question")
        answer = self.answer(row).lower().strip().replace(".", "")
        if category not in MME_SUBTASKS or answer not in ("yes", "no"):
            raise ValueError(
                f"{row.place}: category {category!r} with answer {answer!r}; the categories are "
                f"{', '.join(MME_SUBTASKS)}, and answers are yes and no"
            )
        question = question.replace(YES_OR_NO, "").strip()
        reference = {"answer": answer, "category": category, "pair": pair}
        return self.ask(row, f"{pair}: {question}", question + SHORT_ANSWER, reference, kind=category)

    def own_rows(self, folder: Path) -> list[FileRow] | None:
        """Read the benchmark's own folders, subtask by subtask."""
        if not any((folder / name).is_dir() for name in MME_SUBTASKS):
            return None
        rows = []
        for category in MME_SUBTASKS:
            texts = images = folder / category
            if (texts / "questions_answers_YN").is_dir():
                texts, images = texts / "questions_answers_YN", images / "images"
            for path in sorted(texts.glob("*.txt")):
                image = images / f"{path.stem}.jpg"  # or .png: found when opened
                for line in read_lines(path):
                    question, tab, answer = line.values["text"].partition("\t")
                    if not tab:
                        raise ValueError(f"{line.place}: expected a question, a tab and an answer")
                    values = {"category": category, "question_id": f"{category}/{image.name}", "image": image}
                    rows.append(FileRow({**values, "question": question, "answer": answer}, line.place))
        return rows

    def check(self, samples: Sequence[Sample], rows: Sequence[FileRow]) -> None:
        """Refuse an image that has not two different questions."""
        pairs: dict[tuple[str, str], list[FileRow]] = defaultdict(list)
        for row in rows:
            pairs[row.values["category"], row.values["question_id"]].append(row)
        for (_, pair), two in pairs.items():
            if len({row.values["question"] for row in two}) != 2 or len(two) != 2:
                places = "; ".join(row.place for row in two)
                raise ValueError(f"{places}: image {pair} has {len(two)} questions, but needs two different ones")
