"""MME (Fu et al., arXiv:2306.13394): 14 subtasks of yes/no questions, two to an image.

Read from lmms-eval's Parquet form, or from the benchmark's own folders: ``SUBTASK/NAME.txt`` (question, tab, answer)
and the image beside it, or in ``questions_answers_YN/`` and ``images/``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from subtoken_train.evaluation.metrics.mme_scores import MME_SUBTASKS, MMEScores
from subtoken_train.evaluation.tasks.file_rows import FileRow
from subtoken_train.evaluation.tasks.image_questions import SHORT_ANSWER, ImageQuestions
from subtoken_train.evaluation.tasks.task import Sample
from subtoken_train.evaluation.tasks.text_files import read_lines

YES_OR_NO = " Please answer yes or no."
"""What every question ends with; LLaVA and lmms-eval put their words for short answers in its place. Where two spaces
are before it, as in seven questions, lmms-eval leaves one, and LLaVA, which is followed here, none."""


@dataclass
class MME(ImageQuestions):
    """All subtasks. Accuracy over the questions, the first score, is a reading of the sub-token paper's column."""

    name = "mme"
    hub_id = "lmms-lab/MME"
    rows = 2374
    primary = "accuracy"
    scored_by = MMEScores
    answered = "test"
    columns = ("question_id", "question", "answer", "category")
    where = (
        "Parquet: hf download lmms-lab/MME --repo-type dataset --local-dir DIR. The benchmark's own folders, "
        "MME_Benchmark_release_version, are given on request: "
        "https://github.com/BradyFU/Awesome-Multimodal-Large-Language-Models/tree/Evaluation"
    )

    def sample(self, row: FileRow, number: int) -> Sample:
        """The sample of a row; its id is image and question, because the question ids are the images'."""
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
        """The benchmark's own folders, subtask by subtask."""
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
                        raise ValueError(f"{line.place}: a question, a tab and an answer are wanted")
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
                raise ValueError(f"{places}: image {pair} has {len(two)} questions, and two different ones are wanted")
