"""LongBench v2 (Bai et al., arXiv:2412.15204): 503 questions of four choices about texts of 8,000 to two million words.

Read from its ``data.json``. Prompt, cut in the middle and reading of answers are the original's without reasoning
(THUDM/LongBench at 2e00731f, ``pred.py`` and ``prompts/0shot.txt``). What may be compressed is all up to the end of the
text, the instruction before it included; with ``question: compressed`` all before the last line.

Not here: the original's other prompts (with reasoning, which asks twice; without the text; with retrieved pieces), its
sampling at temperature 0.1, and lm-evaluation-harness's form, which compares the letters' likelihoods.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from subtoken_train.errors import unknown_name
from subtoken_train.evaluation.metrics.metric import MeanScores
from subtoken_train.evaluation.tasks.file_rows import FileRow, find_file, read_entries, task_folder, unique_ids
from subtoken_train.evaluation.tasks.long_context import LongContext
from subtoken_train.evaluation.tasks.task import Sample

FILE = "data.json"
_LETTERS = "ABCD"
_BEFORE = "Please read the following text and answer the question below.\n\n<text>\n"
_AFTER = (
    "\n</text>\n\nWhat is the correct answer to this question: $Q$\nChoices:\n(A) $C_A$\n(B) $C_B$\n(C) $C_C$"
    '\n(D) $C_D$\n\nFormat your response as follows: "The correct answer is (insert answer here)".'
)
_FIELDS = {"$Q$": "question", **{f"$C_{letter}$": f"choice_{letter}" for letter in _LETTERS}}
_SAID = (re.compile(r"The correct answer is \(([A-D])\)"), re.compile(r"The correct answer is ([A-D])"))
_GROUPS = {"difficulty": ("easy", "hard"), "length": ("short", "medium", "long")}


def said_letter(text: str) -> str | None:
    """Return the letter of the first "The correct answer is (A)", else of the first one without brackets, or None."""
    text = text.replace("*", "")
    found = next((match for form in _SAID if (match := form.search(text))), None)
    return found[1] if found else None


class LongBenchV2Accuracy(MeanScores):
    """Shares of right letters: ``accuracy``, and those of the questions of each difficulty and length.

    An answer that names no letter is wrong. A reference holds ``answer``, ``difficulty`` and ``length``.
    """

    names = ("accuracy", *(name for names in _GROUPS.values() for name in names))

    @staticmethod
    def figures(prediction: str, reference: Mapping[str, Any]) -> dict[str, float]:
        """Return 1 or 0, of all questions and of two groups."""
        right = float(said_letter(prediction) == reference["answer"])
        return dict.fromkeys(("accuracy", *(reference[group] for group in _GROUPS)), right)


@dataclass
class LongBenchV2(LongContext):
    """All questions; see ``LongContext`` for ``chat``, in which the original asks, and ``question``."""

    name = "longbench_v2"
    modality = "text"
    rows = 503
    primary = "accuracy"
    scored_by = LongBenchV2Accuracy
    where = "hf download THUDM/LongBench-v2 data.json --repo-type dataset --local-dir DIR"

    def samples(self) -> list[Sample]:
        """Return the questions in the file's order."""
        source = task_folder(self)
        columns = ("_id", "domain", "answer", "context", *_GROUPS, *_FIELDS.values())
        rows = read_entries(find_file(self, source, FILE), None, columns)
        unique_ids((str(row.values["_id"]), row.place) for row in rows)
        return [self._sample(row) for row in rows]

    def _sample(self, row: FileRow) -> Sample:
        for column, allowed in {"answer": tuple(_LETTERS), **_GROUPS}.items():
            if row.values[column] not in allowed:
                raise ValueError(f"{row.place}: {unknown_name(column, row.values[column], allowed)}")
        context, asked = _BEFORE + row.text("context").strip(), _AFTER
        for mark, column in _FIELDS.items():  # one after the other, as the original, in the text too
            context, asked = (part.replace(mark, row.text(column).strip()) for part in (context, asked))
        whole = context + asked
        return Sample(
            str(row.values["_id"]),
            whole,
            {name: row.values[name] for name in ("answer", *_GROUPS)},
            context_characters=whole.rfind("\n") + 1 if self.compresses_question else len(context),
            max_new_tokens=128,
            kind=row.text("domain"),
            cut_middle=True,
            chat=self.chat,
        )
