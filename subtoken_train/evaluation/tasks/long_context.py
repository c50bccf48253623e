"""Tasks of long contexts: the two ways in which their questions may be put, and the tokenizer that measures made texts.

kvpress asks RULER and LongBench in the model's chat template: the context, compressed, then question and answer prefix;
in its query-aware setting the question stands behind the context and is compressed with it. RULER's and LongBench's own
programs compress nothing, and RULER's writes no chat format for a plain model.

Two programs score RULER, and differ in what they do with control characters inside an answer (line breaks, tabs): RULER
itself makes each a line break, kvpress takes it away, so that texts on both sides may join. Both ignore case, and both
round each task's mean to two decimals of a percentage, which is not done here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from subtoken_train.artifact.hub import check_fetched
from subtoken_train.errors import clipped
from subtoken_train.evaluation.metrics.metric import MeanScores, mean
from subtoken_train.evaluation.tasks.task import Task
from subtoken_train.families.backbone_config import is_hub_id, resolve


@lru_cache(maxsize=2)
def read_tokenizer(name: str) -> Any:
    """Load a tokenizer from a folder (that of a shipped model, too) or the Hub; no code that it brings is run."""
    from transformers import AutoTokenizer

    check_fetched(name)
    try:
        return AutoTokenizer.from_pretrained(resolve(name), trust_remote_code=False)
    except Exception as error:  # whatever the readers of broken files raise
        words = clipped(" ".join(str(error).split()) or type(error).__name__, 160)
        raise ValueError(f"tokenizer {name!r} cannot be loaded ({words}); give a folder or a Hub id") from None


def not_at_hand(name: str | None) -> ValueError | None:
    """Return why a tokenizer of the Hub is not at hand now; None where it is, and for a folder's or none at all."""
    if name is None or not is_hub_id(name):
        return None
    try:
        read_tokenizer(name)
    except ValueError as error:
        return error
    return None


class MadeTexts(Task):
    """A task that makes its samples itself, measured by ``tokenizer``, which has to be at hand."""

    needs_files = False
    tokenizer: str | None

    def check_requirements(self) -> None:
        if (error := not_at_hand(self.tokenizer)) is not None:
            raise error

    def check_options(self) -> None:
        if not_at_hand(self.tokenizer) is None:  # else ``check_requirements`` says it: it may be there when it runs
            self.check_lengths()

    def check_lengths(self) -> None:
        """Raise a ``ValueError`` where a sample does not fit into the length that is asked for."""


@dataclass
class LongContext(Task):
    """A benchmark whose context may be compressed before the question is read, or with it.

    Attributes:
        chat: ask in the tokenizer's chat template; a tokenizer without one is refused.
        question: ``kept``: read after the context, in full. ``compressed``: part of what is compressed; the model goes
            on from the answer prefix.
    """

    chat: bool = field(default=False, kw_only=True)
    question: Literal["kept", "compressed"] = field(default="kept", kw_only=True)

    @property
    def asks(self) -> str:
        return f"{'in the chat template' if self.chat else 'raw text, no chat template'}; question {self.question}"

    @property
    def compresses_question(self) -> bool:
        return self.question == "compressed"


RULER_TASKS = (
    "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
    "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2",
)  # fmt: skip
_CONTROL = re.compile(r"[\x00-\x1f]")


def ruler_score(prediction: str, task: str, expected: Sequence[str], control: str = "\n") -> float:
    """Return an answer's score: any expected text counts in full for ``qa`` tasks, each one alike for the others.

    ``control`` takes the place of control characters: a line break for RULER, nothing for kvpress.
    """
    text = _CONTROL.sub(control, prediction.strip()).strip().lower()
    found = [one.lower() in text for one in expected]
    return float(any(found)) if task.startswith("qa") else sum(found) / len(expected)


class RulerMatch(MeanScores):
    """``string_match``, of references ``{"task": name, "answers": [text, ...]}``: the mean over the tasks' means.

    ``kvpress_string_match`` is kvpress's reading. Each task's own mean has the task's name. ``score`` is a sample's
    term of its task's mean; where tasks differ in size the mean of scores is not the mean over tasks.
    """

    names = (*RULER_TASKS, *(f"kvpress_{task}" for task in RULER_TASKS))
    subtasks = RULER_TASKS

    @staticmethod
    def figures(prediction: str, reference: Mapping[str, Any]) -> dict[str, float]:
        task, answers = reference["task"], reference["answers"]
        kvpress = ruler_score(prediction, task, answers, control="")
        return {task: ruler_score(prediction, task, answers), f"kvpress_{task}": kvpress}

    def compute(self) -> dict[str, float]:
        means = super().compute()
        ruler = {task: means[task] for task in RULER_TASKS if task in means}
        kvpress = [means[f"kvpress_{task}"] for task in ruler]
        return {"string_match": mean([*ruler.values()]), "kvpress_string_match": mean(kvpress), **ruler}

    @classmethod
    def score(cls, prediction: Any, reference: Mapping[str, Any]) -> float:
        return cls.figures(prediction, reference)[reference["task"]]
