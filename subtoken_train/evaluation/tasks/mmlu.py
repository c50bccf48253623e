"""MMLU (Hendrycks et al., arXiv:2009.03300): four choices about 57 subjects, scored by the letters' log-likelihoods.

Read from the Parquet form on the Hub, or from CSV files ``dev/SUBJECT_dev.csv`` and ``test/SUBJECT_test.csv``: the
authors' (no header, letters), or with a header and the answers' indices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from subtoken_train.evaluation.metrics.likelihoods import MultipleChoice
from subtoken_train.evaluation.tasks.file_rows import FileRow, task_source
from subtoken_train.evaluation.tasks.image_questions import lettered
from subtoken_train.evaluation.tasks.table_files import read_split, read_table
from subtoken_train.evaluation.tasks.task import Sample, Task

LETTERS = "ABCD"
_CELLS = ("question", "choice0", "choice1", "choice2", "choice3", "answer")


@dataclass
class MMLU(Task):
    """The 14,042 test questions; a subject's first examples of ``dev`` come before each.

    The few-shot prefix is what may be compressed: the question and the letters' likelihoods come after it.

    Attributes:
        style: ``lm_eval`` (lm-evaluation-harness) or ``hendrycks`` (the authors' program), which has two spaces after
            "about" and keeps the space around a question.
    """

    name = "mmlu"
    modality = "text"
    hub_id = "cais/mmlu"
    rows = 14_042
    primary = "accuracy"
    scored_by = MultipleChoice
    where = (
        "Parquet: hf download cais/mmlu --repo-type dataset --local-dir DIR --include 'all/*'. CSV: unpack "
        "https://people.eecs.berkeley.edu/~hendrycks/data.tar, and give its folder data (with dev/ and test/)"
    )

    allowed: ClassVar = {"style": ("lm_eval", "hendrycks"), "num_fewshot": range(6)}

    num_fewshot: int = 5
    style: str = "lm_eval"

    def samples(self) -> Sequence[Sample]:
        """Return all samples in the order of the files; a subject with too few examples is refused."""
        examples = self._by_subject("dev") if self.num_fewshot else {}
        samples = []
        for subject, rows in self._by_subject("test").items():
            shown = examples.get(subject, [])[: self.num_fewshot]
            if len(shown) < self.num_fewshot:
                raise ValueError(
                    f"task mmlu: subject {subject} has {len(shown)} of {self.num_fewshot} examples in dev. {self.where}"
                )
            prefix = self.prefix(subject, shown)
            samples += [
                Sample(
                    f"{subject}/{number}",
                    prefix + self.question(row),
                    {"answer": _answer(row)},
                    choices=tuple(f" {letter}" for letter in LETTERS),
                    context_characters=len(prefix),
                    kind=subject,
                )
                for number, row in enumerate(rows)
            ]
        return samples

    def prefix(self, subject: str, examples: Sequence[FileRow]) -> str:
        """Return what comes before a question: the description and solved examples."""
        gap = "  " if self.style == "hendrycks" else " "
        about = gap + subject.replace("_", " ")
        solved = (f"{self.question(row)} {LETTERS[_answer(row)]}\n\n" for row in examples)
        return f"The following are multiple choice questions (with answers) about{about}.\n\n{''.join(solved)}"

    def question(self, row: FileRow) -> str:
        """Return a question up to where its answer's letter belongs."""
        asked = row.values["question"] if self.style == "hendrycks" else row.values["question"].strip()
        return f"{asked}\n{lettered(row.values['choices'])}\nAnswer:"

    def _by_subject(self, split: str) -> dict[str, list[FileRow]]:
        source = task_source(self)
        subjects: dict[str, list[FileRow]] = defaultdict(list)
        folder = source / split if isinstance(source, Path) else None
        if folder is not None and folder.is_dir():
            for path in sorted(folder.glob(f"*_{split}.csv")):
                subjects[path.stem.removesuffix(f"_{split}")] = _csv_rows(path)
        else:
            for row in read_split(self, split, ("question", "subject", "choices", "answer"), config="all"):
                subjects[row.values["subject"]].append(row)
        if not subjects:
            raise ValueError(f"task mmlu: {folder} has no *_{split}.csv. {self.where}")
        return subjects


def _csv_rows(path: Path) -> list[FileRow]:
    rows = read_table(path, _CELLS, header=False)
    if rows and tuple(rows[0].values.values()) == _CELLS:
        rows = rows[1:]
    return [_unified(row) for row in rows]


def _unified(row: FileRow) -> FileRow:
    """Return a row as the Parquet form has it; an answer that is no letter or number is -1."""
    answer = row.text("answer").strip()
    number = LETTERS.find(answer) if answer in tuple(LETTERS) else int(answer) if answer.isdecimal() else -1
    return row.with_values(choices=[row.values[name] for name in _CELLS[1:5]], answer=number)


def _answer(row: FileRow) -> int:
    answer, choices = row.values["answer"], row.values["choices"]
    if len(choices) != len(LETTERS) or answer not in range(len(LETTERS)):
        raise ValueError(
            f"{row.place}: {len(choices)} choices with answer {answer}; it needs 4 choices, and A to D or 0 to 3"
        )
    return int(answer)
