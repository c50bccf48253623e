"""POPE and MME: yes or no about a photograph, in the Hub's form; POPE in its own, too.

POPE (Li et al., arXiv:2305.10355): 3,000 questions in each of three categories, as the sub-token paper has them, read
as LLaVA (``llava/eval/eval_pope.py``) does. MME (Fu et al., arXiv:2306.13394): 14 subtasks, two questions to an image,
read as lmms-eval (``tasks/mme/utils.py``) does, its points as its own ``eval_tool/calculation.py``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from subtoken_train.evaluation.metrics.metric import TaskMetric, mean
from subtoken_train.evaluation.tasks import files
from subtoken_train.evaluation.tasks.files import FileRow
from subtoken_train.evaluation.tasks.image_questions import SHORT_ANSWER, ImageQuestions
from subtoken_train.evaluation.tasks.table import WORDS
from subtoken_train.evaluation.tasks.task import Sample
from subtoken_train.types import grouped

POPE_CATEGORIES = ("adversarial", "popular", "random")


class POPEScores(TaskMetric):
    """Scores over the counts of predictions and labels; a reference holds ``label`` (yes, no) and ``category``.

    ``accuracy``, ``precision``, ``recall``, ``f1`` (positive: yes) and ``yes_rate``, how often the *model* says yes, of
    answers as LLaVA reads them (``first_sentence_answer``); ``accuracy_CATEGORY`` and ``f1_CATEGORY``; ``llava_f1``,
    the mean of the categories' F1, as LLaVA-1.5's table. A fraction of nothing is 0; LLaVA's program stops there.
    """

    def compute(self) -> dict[str, float]:
        llava = [(first_sentence_answer(text), reference["label"]) for text, reference in self.rows]
        scores = {**_fractions(llava), "yes_rate": _share([said == "yes" for said, _ in llava])}
        f1 = []
        for name in POPE_CATEGORIES:
            own = [pair for pair, (_, of) in zip(llava, self.rows, strict=True) if of["category"] == name]
            if own:
                found = _fractions(own)
                scores |= {f"accuracy_{name}": found["accuracy"], f"f1_{name}": found["f1"]}
                f1.append(found["f1"])
        return {**scores, "llava_f1": _share(f1)}

    @staticmethod
    def score(prediction: Any, reference: Mapping[str, Any]) -> float:
        return float(first_sentence_answer(prediction) == reference["label"])


def first_sentence_answer(text: str) -> str:
    """Return ``no`` for a word No, no or not (parted by spaces, commas out) of the first sentence, else ``yes``."""
    return "no" if {"No", "not", "no"} & set(text.partition(".")[0].replace(",", "").split(" ")) else "yes"


def _fractions(pairs: Sequence[tuple[str, str]]) -> dict[str, float]:
    precision = _share([label == "yes" for said, label in pairs if said == "yes"])
    recall = _share([said == "yes" for said, label in pairs if label == "yes"])
    return {
        "accuracy": _share([said == label for said, label in pairs]),
        "precision": precision,
        "recall": recall,
        "f1": 2 * precision * recall / (precision + recall) if precision + recall else 0.0,
    }


def _share(marks: Sequence[float]) -> float:
    return mean(marks) if marks else 0.0


@dataclass
class POPE(ImageQuestions):
    """Questions of one category (``adversarial``, ``popular``, ``random``) or of ``all``; ids are unique within one."""

    category: str = "all"

    allowed: ClassVar = {"category": ("all", *POPE_CATEGORIES)}

    @property
    def categories(self) -> tuple[str, ...]:
        """The categories that are asked."""
        return POPE_CATEGORIES if self.category == "all" else (self.category,)

    @property
    def expected_rows(self) -> int:
        return 3000 * len(self.categories)

    def sample(self, row: FileRow, number: int) -> Sample:
        category, label = row.values["category"], self.answer(row).lower().strip()
        if label not in ("yes", "no"):
            raise ValueError(f"{row.place}: the answer is {label!r}; POPE's are yes and no")
        name, text = f"{category}/{row.values['question_id']}", row.text("question").strip() + SHORT_ANSWER
        return self.ask(row, name, text, {"label": label, "category": category}, kind=category)

    def own_rows(self, folder: Path) -> list[FileRow] | None:
        if files.parquet_files(folder, self.answered):
            return None
        rows = []
        for category in self.categories:
            name = f"coco_pope_{category}.json"
            path = files.find_file(self, folder, name, f"coco/{name}")
            for row in files.read_jsonl(path, ("question_id", "image", "text", "label")):
                asked = {"question": row.values["text"], "answer": row.values["label"], "category": category}
                rows.append(row.with_values(**asked, image=folder / "val2014" / row.text("image")))
        return rows

    def parquet_rows(self) -> list[FileRow]:
        return [row for row in super().parquet_rows() if row.values["category"] in self.categories]


_MME_TOTALS: dict[str, list[str]] = WORDS["mme"]
MME_SUBTASKS = tuple(name for names in _MME_TOTALS.values() for name in names)


class MMEScores(TaskMetric):
    """Accuracy, and the benchmark's points; a reference holds ``answer`` (yes, no), ``category`` and ``pair`` (image).

    ``accuracy``: right answers over all questions, as lmms-eval reads them; that the sub-token paper prints it is a
    reading (whole numbers of 2,374). ``official_SUBTASK``: 100 (accuracy + share of pairs with both answers right), as
    MME's own program reads answers; ``official_perception`` and ``official_cognition`` are sums, up to 2000 and 800. A
    question without its partner counts for the accuracy alone.
    """

    points = frozenset(f"official_{name}" for name in (*MME_SUBTASKS, *_MME_TOTALS))

    def compute(self) -> dict[str, float]:
        rights = (((of["category"], of["pair"]), official_answer(text) == of["answer"]) for text, of in self.rows)
        pairs, found = grouped(rights), {}
        assert {category for category, _ in pairs} <= set(MME_SUBTASKS)
        for name in MME_SUBTASKS:
            if whole := [two for (category, _), two in pairs.items() if category == name and len(two) == 2]:
                found[name] = 100 * (mean([*map(mean, whole)]) + mean([*map(all, whole)]))
        totals = {total: [found[name] for name in names if name in found] for total, names in _MME_TOTALS.items()}
        points = {total: sum(own) for total, own in totals.items() if own} | found
        scores = {"accuracy": mean([self.score(*row) for row in self.rows])}
        return scores | {f"official_{name}": value for name, value in points.items()}

    @staticmethod
    def score(prediction: Any, reference: Mapping[str, Any]) -> float:
        return float(begun_answer(prediction) == reference["answer"])


def official_answer(text: str) -> str:
    """Return ``yes`` or ``no``, whichever is in the first four characters in lower case (yes first); else ``other``."""
    return next((answer for answer in ("yes", "no") if answer in text.lower()[:4]), "other")


def begun_answer(text: str) -> str:
    """Read an answer as ``official_answer`` does, without outer space and full stops; "y" and "n" alone count, too."""
    text = text.lower().strip().replace(".", "")
    return {"y": "yes", "n": "no"}.get(text) or official_answer(text)


class MME(ImageQuestions):
    """All subtasks; an id is image and question, because the question ids are the images'.

    LLaVA and lmms-eval put their words for short answers in the place of every question's own ending. Where two spaces
    are before it, as in seven questions, lmms-eval leaves one, and LLaVA, which is followed here, none.
    """

    def sample(self, row: FileRow, number: int) -> Sample:
        category, pair, question = str(row.values["category"]), str(row.values["question_id"]), row.text("question")
        answer = self.answer(row).lower().strip().replace(".", "")
        if category not in MME_SUBTASKS or answer not in ("yes", "no"):
            allowed = f"the categories are {', '.join(MME_SUBTASKS)}, and answers are yes and no"
            raise ValueError(f"{row.place}: category {category!r} with answer {answer!r}; {allowed}")
        question = question.replace(" Please answer yes or no.", "").strip()
        reference = {"answer": answer, "category": category, "pair": pair}
        return self.ask(row, f"{pair}: {question}", question + SHORT_ANSWER, reference, kind=category)

    def parquet_rows(self) -> list[FileRow]:
        rows = super().parquet_rows()
        pairs = grouped(((row.values["category"], row.values["question_id"]), row) for row in rows)
        for (_, pair), two in pairs.items():
            if len({row.values["question"] for row in two}) != 2 or len(two) != 2:
                places = "; ".join(row.place for row in two)
                raise ValueError(f"{places}: image {pair} has {len(two)} questions, but needs two different ones")
        return rows
