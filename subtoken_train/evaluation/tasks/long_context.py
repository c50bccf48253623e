"""Tasks of long contexts, and the two ways in which their questions may be put.

kvpress asks RULER and LongBench in the model's chat template: the context, compressed, then question and answer prefix;
in its query-aware setting the question stands behind the context and is compressed with it. RULER's and LongBench's own
programs compress nothing, and RULER's writes no chat format for a plain model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from subtoken_train.evaluation.tasks.task import Task

Question = Literal["kept", "compressed"]


@dataclass
class LongContext(Task):
    """A benchmark whose context may be compressed before the question is read, or with it.

    Attributes:
        chat: ask in the tokenizer's chat template; a tokenizer without one is refused.
        question: ``kept``: read after the context, in full. ``compressed``: part of what is compressed; the model goes
            on from the answer prefix.
    """

    chat: bool = field(default=False, kw_only=True)
    question: Question = field(default="kept", kw_only=True)

    @property
    def asks(self) -> str:
        """See ``Task.asks``."""
        return f"{'in the chat template' if self.chat else 'raw text, no chat template'}; question {self.question}"

    @property
    def compresses_question(self) -> bool:
        """See ``Task.compresses_question``."""
        return self.question == "compressed"


QUESTIONS: tuple[Question, ...] = ("kept", "compressed")
