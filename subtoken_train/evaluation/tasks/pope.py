"""POPE (Li et al., arXiv:2305.10355): is this object in this COCO photograph?

Read from lmms-eval's Parquet form, or from the benchmark's own ``coco_pope_*.json`` (JSON lines) with COCO's images.
Both have 3,000 questions in each of three categories. LLaVA-1.5's paper used a random file of 2,910; the paper of this
package, the 9,000. Answers are read as LLaVA (``llava/eval/eval_pope.py``) and lmms-eval (``tasks/pope/utils.py``) read
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from subtoken_train.evaluation.metrics.metric import TaskMetric, mean
from subtoken_train.evaluation.tasks.file_rows import FileRow, find_file, read_jsonl, task_source
from subtoken_train.evaluation.tasks.image_questions import SHORT_ANSWER, ImageQuestions
from subtoken_train.evaluation.tasks.table_files import parquet_files, read_split
from subtoken_train.evaluation.tasks.task import Sample

POPE_CATEGORIES = ("adversarial", "popular", "random")


class POPEScores(TaskMetric):
    """Scores over the counts of predictions and labels; a label belongs to its sample and is not matched by order.

    A reference holds ``label`` (yes, no) and ``category``.

    Scores:
        ``accuracy``, ``precision``, ``recall``, ``f1``, ``yes_rate``: all samples together, answers as LLaVA reads
            them (``first_sentence_answer``); the positive class is yes, and ``yes_rate`` is how often the *model* says
            yes.
        ``accuracy_CATEGORY``, ``f1_CATEGORY``: the same of one category that has samples.
        ``llava_f1``: mean of the categories' F1, as LLaVA-1.5's table.
        ``lmms_accuracy``, ``lmms_precision``, ``lmms_recall``, ``lmms_f1``: lmms-eval's, which wants exactly "yes" or
            "no" (``bare_answer``): "Yes." is wrong, and a missed yes counts for recall only where the answer is "no".
        ``lmms_yes_ratio``: as lmms-eval's code has it, the share of yes among the *labels*.

    Where no answer or no label is yes, LLaVA's program stops with a ZeroDivisionError; here, as in lmms-eval, a
    fraction of nothing is 0.
    """

    def compute(self) -> dict[str, float]:
        """Return scores by name."""
        llava = [(first_sentence_answer(text), reference["label"]) for text, reference in self.rows]
        lmms = [(bare_answer(text), reference["label"]) for text, reference in self.rows]
        scores = {**_fractions(llava), "yes_rate": _share([said == "yes" for said, _ in llava])}
        f1 = []
        for name in POPE_CATEGORIES:
            own = [pair for pair, (_, of) in zip(llava, self.rows, strict=True) if of["category"] == name]
            if own:
                found = _fractions(own)
                scores |= {f"accuracy_{name}": found["accuracy"], f"f1_{name}": found["f1"]}
                f1.append(found["f1"])
        scores["llava_f1"] = _share(f1)
        scores |= {f"lmms_{name}": value for name, value in _fractions(lmms).items()}
        return {**scores, "lmms_yes_ratio": _share([label == "yes" for _, label in lmms])}

    @staticmethod
    def score(prediction: Any, reference: Mapping[str, Any]) -> float:
        """Return the sample's term of ``accuracy``."""
        return float(first_sentence_answer(prediction) == reference["label"])


def first_sentence_answer(text: str) -> str:
    """Return ``no`` if a word of the first sentence is No, no or not; else ``yes``, for nothing and "NO" too.

    The sentence ends at the first full stop, commas are removed, and words are separated by single spaces (a line break
    separates nothing).
    """
    words = text.partition(".")[0].replace(",", "").split(" ")
    return "no" if {"No", "not", "no"} & set(words) else "yes"


def bare_answer(text: str) -> str:
    """Return the text in lower case without surrounding space; it is right only if it is the label."""
    return text.lower().strip()


def _fractions(pairs: Sequence[tuple[str, str]]) -> dict[str, float]:
    """Return the scores of answers with their labels; only "yes" and "no" count as answers."""
    precision = _share([label == "yes" for said, label in pairs if said == "yes"])
    recall = _share([said == "yes" for said, label in pairs if label == "yes" and said in ("yes", "no")])
    return {
        "accuracy": _share([said == label for said, label in pairs]),
        "precision": precision,
        "recall": recall,
        "f1": 2 * precision * recall / (precision + recall) if precision + recall else 0.0,
    }


def _share(marks: Sequence[float]) -> float:
    return mean(marks) if marks else 0.0


IMAGES = "val2014"


@dataclass
class POPE(ImageQuestions):
    """Questions of one category (``adversarial``, ``popular`` or ``random``) or of ``all``."""

    name = "pope"
    hub_id = "lmms-lab/POPE"
    rows = 9000
    scored_by = POPEScores
    answered = "test"
    columns = ("question_id", "question", "answer", "category")
    where = (
        "Parquet: hf download lmms-lab/POPE --repo-type dataset --local-dir DIR. The benchmark's own form, all in DIR: "
        "output/coco/coco_pope_{random,popular,adversarial}.json of https://github.com/AoiDragon/POPE, and "
        f"{IMAGES}/ of http://images.cocodataset.org/zips/val2014.zip"
    )

    allowed: ClassVar = {"category": ("all", *POPE_CATEGORIES)}

    category: str = "all"

    @property
    def expected_rows(self) -> int:
        return 3000 * len(self._categories)

    def sample(self, row: FileRow, number: int) -> Sample:
        """Return the sample of a row; question ids are unique within a category only."""
        category, label = row.values["category"], self.answer(row).lower().strip()
        if label not in ("yes", "no"):
            raise ValueError(f"{row.place}: the answer is {label!r}; POPE's are yes and no")
        name, text = f"{category}/{row.values['question_id']}", row.text("question").strip() + SHORT_ANSWER
        return self.ask(row, name, text, {"label": label, "category": category}, kind=category)

    def own_rows(self, folder: Path) -> list[FileRow] | None:
        """Read the benchmark's own files, category by category."""
        if parquet_files(folder, self.answered) or any((folder / "Full").glob("*.parquet")):
            return None
        return [row for name in self._categories for row in self._own_rows(folder, name)]

    def parquet_rows(self) -> list[FileRow]:
        """Return the categories' rows: of one split, or of a folder ``Full`` with a split for each."""
        source = task_source(self)
        if not isinstance(source, Path) or parquet_files(source, self.answered):
            rows = super().parquet_rows()
        else:
            rows = [row for name in self._categories for row in read_split(self, name, self.columns, ["image"], "Full")]
        return [row for row in rows if row.values["category"] in self._categories]

    @property
    def _categories(self) -> tuple[str, ...]:
        return POPE_CATEGORIES if self.category == "all" else (self.category,)

    def _own_rows(self, folder: Path, category: str) -> list[FileRow]:
        name = f"coco_pope_{category}.json"
        rows = read_jsonl(find_file(self, folder, name, f"coco/{name}"), ("question_id", "image", "text", "label"))
        return [
            row.with_values(
                question=row.values["text"],
                answer=row.values["label"],
                category=category,
                image=folder / IMAGES / row.text("image"),
            )
            for row in rows
        ]
